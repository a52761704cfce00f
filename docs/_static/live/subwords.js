"use strict";
/*
 * From an English sentence to pieces of words, and from pieces to a German sentence, as the model
 * of captions was trained (section 5.1; pages 12 and 77, annotated.data.tokenizers and
 * .normalization). A sentence goes through four steps:
 *
 *   1. `cleanText` of words.js takes out what cannot be seen, and capitals become small letters.
 *   2. `uniformMarks` writes each mark in one way: “ and „ become ".
 *   3. `Moses.split` puts a space between words and marks, as the scripts of the Moses system do.
 *   4. `Subwords.cut` spells each word in bytes, and merges them into the pieces that were learned.
 *
 * Which characters are letters, digits or signs of currency comes with the model, from the library
 * itself, so that the page agrees with it about every character.
 */

const Subwords = (() => {
  /** The text after all [pattern, replacement] rules, one after the other. */
  function apply(rules, text) {
    return rules.reduce((done, [pattern, replacement]) => done.replace(pattern, replacement), text);
  }

  // ---- One way to write each mark ---------------------------------------------------------------

  const MARK_RULES = [
    [/\(/g, " ("], [/\)/g, ") "], [/ +/g, " "],
    [/\) ([.!:?;,])/g, ")$1"], [/\( /g, "("], [/ \)/g, ")"],
    [/(\p{Nd}) %/gu, "$1%"], [/ ([:;])/g, "$1"],
    [/`/g, "'"], [/''/g, ' " '],
    [/[„“”]/g, '"'], [/–/g, "-"], [/—/g, " - "], [/ +/g, " "],
    [/[´‘‚’]/g, "'"], [/''/g, '"'], [/…/g, "..."], [/[«»]/g, '"'],
    [/"([,.]+)/g, '$1"'], // comma and period stand before a quotation mark that closes
  ];

  function uniformMarks(text) {
    return apply(MARK_RULES, text).trim();
  }

  // ---- Words and marks --------------------------------------------------------------------------

  class Moses {
    /**
     * alphabet, digits, letters (both of them), small, currency, cjk: the insides of classes of
     * regular expressions, such as "a-z". A word of `abbreviations` keeps its period, one of
     * `beforeNumbers` keeps it before a number.
     */
    constructor({ alphabet, digits, letters, small, currency, cjk, abbreviations, beforeNumbers }) {
      const rule = (pattern, replacement) => [new RegExp(pattern, "gu"), replacement];
      this.spaces = [
        rule(`([^${letters}\\s.'\`,\\-])`, " $1 "), // a mark is a token of its own
        rule("\\.{2,}", (dots) => ` ${"D".repeat(dots.length)} `), // the only capitals: see `ends`
        rule(`([^${digits}]),`, "$1 , "), // a comma is one, too, but 5,300 is one number
        rule(`,([^${digits}])`, " , $1"),
        rule(`([${digits}]),$`, "$1 , "),
        rule(`([^${alphabet}])'([^${alphabet}])`, "$1 ' $2"),
        rule(`([^${alphabet}${digits}])'([${alphabet}])`, "$1 ' $2"),
        rule(`([${alphabet}])'([^${alphabet}])`, "$1 ' $2"),
        rule(`([${alphabet}])'([${alphabet}])`, "$1 '$2"), // dog's is dog and 's
        rule(`([${digits}])'(s)`, "$1 '$2"),
      ];
      this.ends = [[/\.' ?$/, " . ' "], [/D+/g, (dots) => ".".repeat(dots.length)]];
      this.hasLetter = new RegExp(`[${alphabet}]`, "u");
      this.beginsSmall = new RegExp(`^[${small}]`, "u");
      this.opens = new RegExp(`^[${currency}([{¿¡]+$`, "u");
      this.beginsCjk = new RegExp(`^[${cjk}]`, "u");
      this.endsCjk = new RegExp(`[${cjk}]$`, "u");
      this.abbreviations = new Set(abbreviations);
      this.beforeNumbers = new Set(beforeNumbers);
    }

    /** An English text without capitals, with a space between its tokens. */
    split(text) {
      return apply(this.ends, this.splitPeriods(apply(this.spaces, text)));
    }

    /** A period at the end of a word is a token, unless the word is an abbreviation. */
    splitPeriods(text) {
      const tokens = text.split(" ").filter(Boolean);
      return tokens.map((token, i) => {
        if (token === "." || !token.endsWith(".")) return token;
        const [word, next] = [token.slice(0, -1), tokens[i + 1] ?? ""];
        const kept = (word.includes(".") && this.hasLetter.test(word))
          || this.abbreviations.has(word) || this.beginsSmall.test(next)
          || (this.beforeNumbers.has(word) && /^[0-9]/.test(next));
        return kept ? token : `${word} .`;
      }).join(" ");
    }

    /** German tokens, separated by spaces, as running text. */
    join(text) {
      const met = {}; // how often each quotation mark was met
      let [joined, space] = ["", ""];
      const tokens = text.replace(SPACES, " ").split(" ").filter(Boolean);
      tokens.forEach((token, i) => {
        let [before, after] = [true, true]; // may a space stand there?
        if (this.beginsCjk.test(token)) {
          before = i === 0 || !this.endsCjk.test(tokens[i - 1]);
        } else if (this.opens.test(token)) {
          after = false;
        } else if (/^[,.?!:;\\%})\]]+$/.test(token)) {
          before = false;
        } else if (/^['"„“`]+$/.test(token)) {
          const mark = /^[„“]+$/.test(token) ? '"' : token;
          met[mark] = (met[mark] ?? 0) + 1;
          [before, after] = met[mark] % 2 ? [true, false] : [false, true];
        }
        joined += (before ? space : "") + token;
        space = after ? " " : "";
      });
      return joined;
    }
  }

  // ---- Bytes and pieces -------------------------------------------------------------------------

  /** A letter for each byte: one that can be printed spells itself, others come from U+0100. */
  const LETTERS = (() => {
    const printed = (byte) => (byte > 0x20 && byte < 0x7f) || (byte > 0xa0 && byte !== 0xad);
    let next = 0x100;
    return Array.from({ length: 256 }, (_, b) => String.fromCodePoint(printed(b) ? b : next++));
  })();
  const BYTES = new Map(LETTERS.map((letter, byte) => [letter, byte]));

  /** Words with the space before them, numbers, runs of marks: no piece reaches across. */
  const CHUNKS = /'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+/gu;

  /** What Python's repr makes of a character that is not printed. */
  function escaped(character) {
    const short = { "\t": "\\t", "\n": "\\n", "\r": "\\r" }[character];
    if (short) return short;
    const code = character.codePointAt(0);
    const [letter, width] = code < 0x100 ? ["x", 2] : code < 0x10000 ? ["u", 4] : ["U", 8];
    return `\\${letter}${code.toString(16).padStart(width, "0")}`;
  }

  /** The bytes of a piece as a label: ▁ for a space, part of a letter as \x with its number. */
  function readable(bytes) {
    try {
      const text = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
      return text.replace(/ /g, "▁").replace(/[\p{C}\p{Z}]/gu, escaped);
    } catch {
      return Array.from(bytes, (byte) => `\\x${byte.toString(16).padStart(2, "0")}`).join("");
    }
  }

  /** The tokenizer of the model: one table of pieces for both languages, which knows every text. */
  class Subwords {
    /** merges: a line for each pair of pieces that becomes one, in the order of learning. */
    constructor({ merges, moses }) {
      const pairs = merges.split("\n");
      const spelt = [...[...LETTERS].sort(), ...pairs.map((pair) => pair.replace(" ", ""))];
      const special = ["", "", "", "<unk>"].map((text) => new TextEncoder().encode(text));
      this.moses = new Moses(moses);
      this.ranks = new Map(pairs.map((pair, rank) => [pair, rank]));
      this.ids = new Map(spelt.map((piece, i) => [piece, i + UNKNOWN + 1]));
      const bytes = spelt.map((piece) => Uint8Array.from(piece, (letter) => BYTES.get(letter)));
      this.bytes = [...special, ...bytes]; // of each id, as is its label
      this.labels = ["<pad>", "<s>", "</s>", "<unk>", ...bytes.map(readable)];
      this.seen = new Set(this.labels.slice(-pairs.length).join(""));
    }

    /** The form of the training text: small letters, Moses' marks and tokens. */
    normalized(text) {
      return this.moses.split(uniformMarks(cleanText(text).toLowerCase()));
    }

    /** The pieces of a chunk: of all pairs that were learned, the earliest is merged first. */
    cut(chunk) {
      const pieces = Array.from(new TextEncoder().encode(chunk), (byte) => LETTERS[byte]);
      for (;;) {
        const pairs = pieces.slice(1).map((piece, i) => `${pieces[i]} ${piece}`);
        const ranks = pairs.map((pair) => this.ranks.get(pair) ?? Infinity);
        const first = Math.min(...ranks);
        if (first === Infinity) return pieces;
        const place = ranks.indexOf(first);
        pieces.splice(place, 2, pieces[place] + pieces[place + 1]);
      }
    }

    /**
     * {pieces, ids, unknown, strange}: the tokens of an English sentence and their ids. Only half a
     * character is unknown; `strange` are the characters that training has hardly shown, each once.
     */
    encode(text) {
      const unknown = text.match(/\p{Cs}/gu) ?? [];
      if (unknown.length) return { pieces: [], ids: [], unknown: unknown.slice(0, 1), strange: [] };
      const form = this.normalized(text);
      const chunks = (form && ` ${form}`).match(CHUNKS) ?? []; // a space before the first word, too
      const ids = chunks.flatMap((chunk) => this.cut(chunk)).map((piece) => this.ids.get(piece));
      const strange = [...new Set(form.replaceAll(" ", ""))].filter((one) => !this.seen.has(one));
      return { pieces: this.pieces(ids), ids, unknown, strange };
    }

    /** The labels of ids, `<s>` and `</s>` among them. */
    pieces(ids) {
      return ids.map((id) => this.labels[id]);
    }

    /** The sentence that ids say, up to the end token; a part of a letter is left out. */
    decode(ids) {
      const end = ids.indexOf(END);
      const bytes = (end < 0 ? ids : ids.slice(0, end)).flatMap((id) => [...this.bytes[id]]);
      const text = new TextDecoder("utf-8", { ignoreBOM: true }).decode(Uint8Array.from(bytes));
      return this.moses.join(text).replaceAll("\ufffd", "");
    }

    /** What is wrong with an unknown part of a text. */
    refusal() {
      return "is half a character, which nothing can translate.";
    }

    /** Words that look like an unknown one: there is no unknown word. */
    similar() {
      return [];
    }

    /** A list of all words, where there is one. */
    known() {
      return [];
    }
  }

  return Subwords;
})();

if (typeof module === "object") module.exports = Subwords;
