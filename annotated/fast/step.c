// One step of the Transformer's decoder: the newest token of each row in, its hidden vector out.
// A row is a sentence, or one of its hypotheses. The file is compiled once for each precision,
// with -DBITS=32 (fp32), 16 (bf16) or 8 (int8):
//   cc -DBITS=32 -O3 -march=native -fopenmp -shared -fPIC -Wall -Wextra -Werror step.c -lm
// `omp for` divides a loop among the threads that decoder_step starts; each result is computed by
// one thread, in one order, so it does not depend on their number.
#include <math.h>
#include <stdint.h>
#include <string.h>

// --- precision: what a matrix product multiplies, and what it sums in
#if BITS == 8  // GROUP inputs meet GROUP weights in one instruction
typedef uint8_t activation;
typedef int8_t weight;
typedef int32_t accumulator;
enum {GROUP = 4};
#elif BITS == 16
typedef uint16_t activation, weight;  // the upper half of a float
typedef float accumulator;
enum {GROUP = 2};
#else
typedef float activation, weight, accumulator;
enum {GROUP = 1};
#endif

#ifdef __AVX512F__
#include <immintrin.h>
enum {LANES = 16, TILE_ROWS = 8};  // numbers in a register; rows that share a read of the weights
#else
enum {LANES = 8, TILE_ROWS = 2};
#endif
enum {BLOCK = 32, REGISTERS = BLOCK / LANES};  // outputs of a block of weights
typedef accumulator vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

// --- structures
typedef struct {          // y = x W^T + b
  const weight *weights;  // (out / BLOCK, in / GROUP, BLOCK, GROUP), both quotients rounded up
  const float *scale;     // int8: of each output's weights
  const float *bias;
  const int32_t *sum;     // int8: of each output's weights
  int64_t in, out;
} Matrix;

typedef struct {
  const float *gain, *bias;
  double eps;
} LayerNorm;

typedef struct {
  Matrix W_QKV, W_O, cross_W_Q, cross_W_O, W_1, W_2;
  LayerNorm norms[3];
  float *self_cache;         // (rows, h, capacity, d_k + d_v): a key and its value side by side
  const float *cross_cache;  // (sentences, h, source_length, d_k + d_v)
} Layer;

typedef struct {
  const Layer *layers;
  const LayerNorm *final_norm;
  const float *embedding, *positions;  // (vocab_size, d_model), (capacity, d_model)
  const uint8_t *source_mask;          // (sentences, source_length), 1 = may attend
  const int32_t *sentence;             // (rows)
  int32_t *cache_row;  // (rows, capacity): the row of self_cache in which a position lies
  float *x;            // (rows, d_model): the residual stream
  float *input, *output, *scores;  // of the sub-layer at work
  activation *quantized;           // its input in this precision
  float *scale;
  int32_t *zero_point;
  int64_t N, d_model, h, vocab_size, norm_first, d_k, d_v, capacity, source_length, threads;
} Decoder;

// --- quantize: inputs of a product in its precision
static inline float from_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

static inline int64_t padded(int64_t size) { return (size + GROUP - 1) / GROUP * GROUP; }

void quantize_row(const float *x, int64_t size, activation *q, float *scale, int32_t *zero_point) {
#if BITS == 8  // x = scale * (q - zero_point)
  float low = 0, high = 0;
#pragma omp simd reduction(min:low) reduction(max:high)
  for (int64_t i = 0; i < size; i++) {
    low = x[i] < low ? x[i] : low;
    high = x[i] > high ? x[i] : high;
  }
  *scale = (high - low + 1e-30f) / 255;
  float inverse = 1 / *scale;
  float zero = rintf(-low * inverse);
  zero = zero > 0 ? zero : 0;  // also for NaN
  *zero_point = (int32_t)zero;
  for (int64_t i = 0; i < size; i++) {
    float level = rintf(x[i] * inverse) + zero;
    q[i] = (uint8_t)(level > 0 ? (level < 255 ? level : 255) : 0);
  }
#else
  (void)scale, (void)zero_point;
#if BITS == 16
  for (int64_t i = 0; i < size; i++) {
    uint32_t bits;
    memcpy(&bits, x + i, 4);
    q[i] = (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);  // to nearest, ties to even
  }
#else
  memcpy(q, x, size * sizeof(float));
#endif
#endif
  for (int64_t i = size; i < padded(size); i++) q[i] = 0;
}

void quantize(const Decoder *d, int64_t rows, const float *x, int64_t size) {
#pragma omp for
  for (int64_t r = 0; r < rows; r++)
    quantize_row(x + r * size, size, d->quantized + r * padded(size), d->scale + r,
                 d->zero_point + r);
}

// --- matmul: all rows against a block of weights at a time
static inline vector multiply_add(vector sum, const activation *x, const weight *w) {
#if BITS == 8 && defined(__AVX512VNNI__)
  int32_t group;
  memcpy(&group, x, 4);
  return (vector)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi32(group),
                                     _mm512_loadu_si512(w));
#elif BITS == 16 && defined(__AVX512BF16__)
  int32_t group;
  memcpy(&group, x, 4);
  return (vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(group),
                                  (__m512bh)_mm512_loadu_si512(w));
#elif BITS == 32
  return sum + *x * *(const vector *)w;
#else
  for (int j = 0; j < LANES; j++)
    for (int g = 0; g < GROUP; g++)
#if BITS == 8
      sum[j] += (int32_t)x[g] * w[j * GROUP + g];
#else
      sum[j] += from_bits((uint32_t)x[g] << 16) * from_bits((uint32_t)w[j * GROUP + g] << 16);
#endif
  return sum;
#endif
}

static inline __attribute__((always_inline)) void matmul_tile(  // sums stay in registers
    const int rows, const weight *w, int64_t groups, const activation *x, accumulator *y) {
  vector sum[TILE_ROWS][REGISTERS] = {0};
  for (int64_t k = 0; k < groups; k++, w += BLOCK * GROUP, x += GROUP)
    for (int r = 0; r < rows; r++)
      for (int v = 0; v < REGISTERS; v++)
        sum[r][v] = multiply_add(sum[r][v], x + r * groups * GROUP, w + v * LANES * GROUP);
  memcpy(y, sum, rows * BLOCK * sizeof(accumulator));
}

void matmul(const Decoder *d, const Matrix *m, int64_t rows, float *y, int relu) {
  int64_t groups = padded(m->in) / GROUP;
#pragma omp for
  for (int64_t o = 0; o < m->out; o += BLOCK)
    for (int64_t r = 0, tile; r < rows; r += tile) {
      accumulator sum[TILE_ROWS * BLOCK];
      const weight *w = m->weights + o * groups * GROUP;
      const activation *x = d->quantized + r * groups * GROUP;
      tile = rows - r >= TILE_ROWS ? TILE_ROWS : rows - r >= TILE_ROWS / 2 ? TILE_ROWS / 2 : 1;
      if (tile == TILE_ROWS) matmul_tile(TILE_ROWS, w, groups, x, sum);
      else if (tile == 1) matmul_tile(1, w, groups, x, sum);
      else matmul_tile(TILE_ROWS / 2, w, groups, x, sum);
      for (int i = 0; i < tile; i++) {
        float value[BLOCK];
        for (int j = 0; j < BLOCK; j++) {
#if BITS == 8
          int32_t product = sum[i * BLOCK + j] - d->zero_point[r + i] * m->sum[o + j];
          value[j] = d->scale[r + i] * m->scale[o + j] * product + m->bias[o + j];
#else
          value[j] = sum[i * BLOCK + j] + m->bias[o + j];
#endif
          if (relu) value[j] = value[j] < 0 ? 0 : value[j];
        }
        int64_t width = m->out - o < BLOCK ? m->out - o : BLOCK;
        memcpy(y + (r + i) * m->out + o, value, width * sizeof(float));
      }
    }
}

// --- layer_norm, and what stands between two sub-layers
void layer_norm(const LayerNorm *norm, const float *x, float *y, int64_t size) {
  float total = 0, squares = 0;
#pragma omp simd reduction(+:total)
  for (int64_t i = 0; i < size; i++) total += x[i];
  float mean = total / size;
#pragma omp simd reduction(+:squares)
  for (int64_t i = 0; i < size; i++) squares += (x[i] - mean) * (x[i] - mean);
  float inverse = 1 / sqrtf(squares / size + (float)norm->eps);
  for (int64_t i = 0; i < size; i++)
    y[i] = (x[i] - mean) * inverse * norm->gain[i] + norm->bias[i];
}

void add_and_norm(const Decoder *d, int64_t rows, const float *output, const LayerNorm *post_norm,
                  const LayerNorm *pre_norm) {
  int64_t size = d->d_model;
#pragma omp for
  for (int64_t r = 0; r < rows; r++) {
    float *x = d->x + r * size, *input = d->input + r * size;
    if (output)
      for (int64_t i = 0; i < size; i++) x[i] += output[r * size + i];
    if (post_norm) layer_norm(post_norm, x, x, size);
    if (pre_norm) layer_norm(pre_norm, x, input, size);
    else memcpy(input, x, size * sizeof(float));
    quantize_row(input, size, d->quantized + r * padded(size), d->scale + r, d->zero_point + r);
  }
}

// --- attention
static inline float exp_of_negative(float x) {  // e^x for x <= 0, to 7 digits; the loop vectorizes
  float y = x * 1.44269504f < -126 ? -126 : x * 1.44269504f, whole = rintf(y), t = y - whole;
  float p = 1 + t * (0.693147181f + t * (0.240226507f + t * (0.0555041086f
            + t * (0.00961812911f + t * (0.00133335581f + t * 0.000154035304f)))));
  return p * from_bits((uint32_t)((int32_t)whole + 127) << 23);
}

static inline const float *key_value(const Decoder *d, const float *cache, int64_t row,
                                     int64_t head, int64_t capacity, int64_t position) {
  return cache + ((row * d->h + head) * capacity + position) * (d->d_k + d->d_v);
}

void attention_head(const Decoder *d, int64_t row, int64_t head, const float *query,
                    const float *cache, int64_t capacity, const int32_t *cache_row,
                    const uint8_t *mask, int64_t length) {
  int64_t longest = d->capacity > d->source_length ? d->capacity : d->source_length;
  float *scores = d->scores + (row * d->h + head) * longest, largest = -INFINITY, total = 0;
  float *output = d->input + (row * d->h + head) * d->d_v, factor = 1 / sqrtf(d->d_k);
  for (int64_t p = 0; p < length; p++) {
    int64_t r = cache_row ? cache_row[p] : d->sentence[row];
    const float *key = key_value(d, cache, r, head, capacity, p);
    float score = 0;
#pragma omp simd reduction(+:score)
    for (int64_t i = 0; i < d->d_k; i++) score += query[i] * key[i];
    scores[p] = mask && !mask[p] ? -INFINITY : score * factor;
    largest = scores[p] > largest ? scores[p] : largest;
  }
  memset(output, 0, d->d_v * sizeof(float));
  if (largest == -INFINITY) return;  // nothing to attend to
#pragma omp simd reduction(+:total)
  for (int64_t p = 0; p < length; p++)
    total += scores[p] = scores[p] == -INFINITY ? 0 : exp_of_negative(scores[p] - largest);
  for (int64_t p = 0; p < length; p++) {
    int64_t r = cache_row ? cache_row[p] : d->sentence[row];
    const float *value = key_value(d, cache, r, head, capacity, p) + d->d_k;
    float weight_of_p = scores[p] / total;
    for (int64_t i = 0; i < d->d_v; i++) output[i] += weight_of_p * value[i];
  }
}

void self_attention(const Decoder *d, const Layer *layer, int64_t rows, int64_t position) {
  int64_t keys = d->h * d->d_k, stride = layer->W_QKV.out;
#pragma omp for
  for (int64_t job = 0; job < rows * d->h; job++) {
    int64_t row = job / d->h, head = job % d->h;
    const float *query = d->output + row * stride + head * d->d_k;
    float *newest = layer->self_cache
                    + ((row * d->h + head) * d->capacity + position) * (d->d_k + d->d_v);
    memcpy(newest, query + keys, d->d_k * sizeof(float));
    memcpy(newest + d->d_k, d->output + row * stride + 2 * keys + head * d->d_v,
           d->d_v * sizeof(float));
    attention_head(d, row, head, query, layer->self_cache, d->capacity,
                   d->cache_row + row * d->capacity, 0, position + 1);
  }
}

void cross_attention(const Decoder *d, const Layer *layer, int64_t rows) {
  int64_t n = d->source_length;
#pragma omp for
  for (int64_t job = 0; job < rows * d->h; job++) {
    int64_t row = job / d->h, head = job % d->h;
    attention_head(d, row, head, d->output + job * d->d_k, layer->cross_cache, n, 0,
                   d->source_mask + d->sentence[row] * n, n);
  }
}

// --- the step: -1, or the row whose token is outside the vocabulary
void embed(const Decoder *d, int64_t rows, int64_t position, const int64_t *tokens) {
  float factor = sqrtf(d->d_model);
#pragma omp for
  for (int64_t r = 0; r < rows; r++) {
    d->cache_row[r * d->capacity + position] = (int32_t)r;
    const float *embedding = d->embedding + tokens[r] * d->d_model;
    const float *encoding = d->positions + position * d->d_model;
    for (int64_t i = 0; i < d->d_model; i++)
      d->x[r * d->d_model + i] = embedding[i] * factor + encoding[i];
  }
}

int decoder_step(const Decoder *d, int64_t rows, int64_t position, const int64_t *tokens,
                 float *hidden) {
  for (int64_t r = 0; r < rows; r++)
    if (tokens[r] < 0 || tokens[r] >= d->vocab_size) return (int)r;
  int pre = d->norm_first != 0;
  int64_t heads = d->h * d->d_v;
#pragma omp parallel num_threads((int)d->threads)
  {
    const LayerNorm *post_norm = 0;  // of the sub-layer before
    embed(d, rows, position, tokens);
    for (const Layer *l = d->layers; l < d->layers + d->N; l++) {
      const LayerNorm *norms = l->norms;
      add_and_norm(d, rows, l > d->layers ? d->output : 0, post_norm, pre ? norms : 0);
      matmul(d, &l->W_QKV, rows, d->output, 0);
      self_attention(d, l, rows, position);
      quantize(d, rows, d->input, heads);
      matmul(d, &l->W_O, rows, d->output, 0);
      add_and_norm(d, rows, d->output, pre ? 0 : norms, pre ? norms + 1 : 0);
      matmul(d, &l->cross_W_Q, rows, d->output, 0);
      cross_attention(d, l, rows);
      quantize(d, rows, d->input, heads);
      matmul(d, &l->cross_W_O, rows, d->output, 0);
      add_and_norm(d, rows, d->output, pre ? 0 : norms + 1, pre ? norms + 2 : 0);
      matmul(d, &l->W_1, rows, d->output, 1);
      quantize(d, rows, d->output, l->W_1.out);
      matmul(d, &l->W_2, rows, d->output, 0);
      post_norm = pre ? 0 : norms + 2;
    }
    add_and_norm(d, rows, d->output, post_norm, pre ? d->final_norm : 0);
#pragma omp for
    for (int64_t i = 0; i < rows * d->d_model; i++) hidden[i] = d->input[i];
  }
  return -1;
}
