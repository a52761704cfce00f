"use strict";
/*
 * From an English sentence to token ids, and from ids to a German sentence (section 5.1; page 12,
 * annotated.data.tokenizers).
 *
 * The library splits sentences at a regular expression. For the toy language two rules are enough:
 * spaces separate, and the marks . , ? at the end of a word (and , ? before it) are tokens of their
 * own. Whatever these rules might split differently holds a word that is not in the toy language,
 * and is refused with its name: a sentence that is accepted has the very tokens that the library
 * gives it.
 */

const BEGIN = 1, END = 2, UNKNOWN = 3; // the ids before the first word

/** What is white space in Unicode, but no plain space. */
const SPACES = /[\t-\r\x1c-\x1f\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]/g;

/** A terminal's codes. */
const CODES = /\x1b(?:\[[0-?]*[ -/]*[@-~]|[@-Z\\\-_])/g;

/** What cannot be seen and has no meaning: control characters, marks of direction, soft hyphens. */
const UNSEEN = new RegExp("[\\x00-\\x08\\x0e-\\x1b\\x7f-\\x84\\x86-\\x9f\\xad\\u061c\\u180e\\u200b"
  + "\\u200e\\u200f\\u202a-\\u202e\\u2060-\\u206f\\ufeff\\ufff9-\\ufffb"
  + "\\u{e0000}-\\u{e007f}]", "gu");

/**
 * A text without what cannot be seen, every Unicode space a space, in NFC: `clean_text` of
 * annotated.data.normalization (page 77).
 */
function cleanText(text) {
  return text.replace(CODES, "").replace(UNSEEN, "").replace(SPACES, " ").normalize("NFC");
}

/** The words and marks of a text, in order. */
function splitWords(text) {
  return cleanText(text).split(/ +/).filter(Boolean).flatMap((chunk) => {
    const tail = [];
    const head = [];
    while (/^[,?].|[.,?]$/su.test(chunk)) {
      const mark = chunk.match(/\.\.+$|[.,?]$/); // an ellipsis is one token, and not a toy one
      if (mark) {
        tail.unshift(mark[0]);
        chunk = chunk.slice(0, mark.index);
      } else {
        head.push(chunk[0]);
        chunk = chunk.slice(1);
      }
      if (!chunk) break;
    }
    return [...head, ...(chunk ? [chunk] : []), ...tail];
  });
}

/** Words and marks as running text. */
function joinWords(words) {
  return words.join(" ").replace(/ (?=[.,?])/g, "");
}

/**
 * The tokenizer of the model: one joint table of words for both languages, of which only the
 * English may go in.
 */
class Words {
  constructor({ vocabulary, english }) {
    this.table = vocabulary; // what each id stands for: the model may write any of them
    this.ids = new Map(english.map((id) => [vocabulary[id], id]));
    this.german = new Set(vocabulary.slice(UNKNOWN + 1).filter((word) => !this.ids.has(word)));
  }

  /**
   * {pieces, ids, unknown, strange}: the tokens of an English sentence, their ids, and each word
   * that has none, once. What has an id is not strange.
   */
  encode(text) {
    const pieces = splitWords(text);
    const unknown = [...new Set(pieces.filter((piece) => !this.ids.has(piece)))];
    const ids = pieces.map((piece) => this.ids.get(piece) ?? UNKNOWN);
    return { pieces, ids, unknown, strange: [] };
  }

  /** The labels of ids, `<s>` and `</s>` among them. */
  pieces(ids) {
    return ids.map((id) => this.table[id]);
  }

  /** The sentence that ids say, up to the end token. */
  decode(ids) {
    const end = ids.indexOf(END);
    return joinWords(this.pieces(end < 0 ? ids : ids.slice(0, end)));
  }

  /** What is wrong with an unknown word. */
  refusal(word) {
    return this.german.has(word)
      ? "is a German word of the toy language; this page translates from English."
      : "is not in the toy language.";
  }

  /** The English words, without marks, in alphabetical order. */
  known() {
    const known = [...this.ids.keys()].filter((word) => /\p{L}/u.test(word));
    return known.sort((a, b) => a.localeCompare(b, "en"));
  }

  /**
   * The English words that look most like this one, `count` at most: "Where" for "where", "sleep"
   * for "slep".
   */
  similar(word, count = 3) {
    const spelling = word.toLowerCase();
    if (spelling.length > 30) return [];
    const known = this.known();
    const distances = known.map((other) => editDistance(spelling, other.toLowerCase()));
    const nearest = Math.min(...distances);
    if (nearest > Math.min(2, spelling.length / 3)) return [];
    return known.filter((_, i) => distances[i] === nearest).slice(0, count);
  }
}

/**
 * How many letters must be added, dropped or changed to make one word of the other (Levenshtein).
 */
function editDistance(a, b) {
  let row = Array.from({ length: b.length + 1 }, (_, j) => j);
  for (let i = 1; i <= a.length; i++) {
    const above = row;
    row = [i];
    for (let j = 1; j <= b.length; j++) {
      const changed = a[i - 1] === b[j - 1] ? 0 : 1;
      row[j] = Math.min(above[j] + 1, row[j - 1] + 1, above[j - 1] + changed);
    }
  }
  return row[b.length];
}

if (typeof module === "object") {
  module.exports = { BEGIN, END, UNKNOWN, SPACES, cleanText, Words };
}
