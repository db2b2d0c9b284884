"""What must hold of a tokenizer.json before the library sees it.

The library panics on some of these files and takes others in silence: two tokens with one id, an
id far past the embedding. Every error carries the JSON pointer.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from typing import Any, NoReturn, final

from cutaway.errors import TokenizerError
from cutaway.formats.strict_json import pointer
from cutaway.tokenizers.rust import component, rust_errors

__all__ = ["check_tokenizer_json"]

MODELS = ("BPE", "Unigram", "WordLevel", "WordPiece")
_KINDS = {
    "normalizer": "BertNormalizer ByteLevel Lowercase NFC NFD NFKC NFKD Nmt Precompiled Prepend Replace Sequence Strip "
    "StripAccents",
    "pre_tokenizer": "BertPreTokenizer ByteLevel CharDelimiterSplit Digits FixedLength Metaspace Punctuation Sequence "
    "Split UnicodeScripts Whitespace WhitespaceSplit",
    "post_processor": "BertProcessing ByteLevel RobertaProcessing Sequence TemplateProcessing",
    "decoder": "BPEDecoder ByteFallback ByteLevel CTC Fuse Metaspace Replace Sequence Strip WordPiece",
}
_MOST_GROWTH = 64.0  # times that normalizer or decoder may lengthen a text
_MOST_AROUND = 64  # tokens that a template may put around one
_PARTS = ("normalizers", "pretokenizers", "processors", "decoders")
_HIGHEST = 1 << 24  # an id past any model
_SAMPLE = "a ﬁ é\u0301 ① あ 🙂"
_LONGEST = 4096  # characters of one added token
_MOST_PIECES = 6 << 20  # bytes of all pieces together: the library's trie takes about 100 for each
_LONGEST_WORD = 1000  # characters: WordPiece takes quadratic time in them
_LONGEST_TEXT = 256  # bytes that a table of characters may put for one; SentencePiece's own have 33 at most
# A repeated group whose whole body is one repeated thing, (a+)+: exponential on a near miss.
_NESTED = re.compile(r"\((?:\?:)?(?:\\.(?:\{[^}]*\})?|\[(?:\\.|[^\]])*\]|[^()\\\[\]|])[+*]\)[+*]")


def check_tokenizer_json(tree: Any, *, path: str, rows: int | None = None) -> None:
    """Raise TokenizerError unless every id, merge and part of the file makes sense. ``rows``: of the embedding."""
    _Check(path, rows).all(tree)


@final
class _Check:
    def __init__(self, path: str, rows: int | None) -> None:
        self._path = path
        self._rows = rows

    def fail(self, what: str, *keys: str | int, expected: object = None, got: object = None) -> NoReturn:
        raise TokenizerError(what, path=self._path, field=pointer(*keys) or None, expected=expected, got=got)

    def all(self, tree: Any) -> None:
        if not isinstance(tree, dict):
            self.fail("is not an object", expected="a tokenizer.json", got=type(tree).__name__)
        model = tree.get("model")
        if not isinstance(model, dict):
            self.fail("is missing or no object", "model")
        kind = model.get("type", "BPE" if "merges" in model else None)
        if kind not in MODELS:
            self.fail("unknown type", "model", "type", expected=" ".join(MODELS), got=kind)
        vocab = self._pieces(model) if kind == "Unigram" else self._vocab(model)
        self._added(tree.get("added_tokens"), vocab)
        if kind == "BPE":
            self._merges(model, vocab)
        longest = model.get("max_input_chars_per_word", 1) if kind == "WordPiece" else 1
        if type(longest) is not int or not 0 < longest <= _LONGEST_WORD:
            expected = f"1 to {_LONGEST_WORD}"
            self.fail("is no length of a word", "model", "max_input_chars_per_word", expected=expected, got=longest)
        if kind != "Unigram":
            self._unknown(model, vocab, tree.get("added_tokens") or [])
        self._sizes(tree)
        for part in _KINDS:
            self._types(part, tree.get(part), part)
            self._growth(part, tree.get(part))
            with rust_errors("is not understood", path=self._path, field=pointer(part)):
                made = component(part, tree.get(part))
                if part == "normalizer" and made is not None:
                    made.normalize_str(_SAMPLE)  # a damaged table of characters only shows in use

    # -- the model

    def _vocab(self, model: dict[str, Any]) -> dict[str, int]:
        vocab = model.get("vocab")
        if not isinstance(vocab, dict) or not vocab:
            self.fail("is missing or empty", "model", "vocab", expected="token to id")
        for token, index in vocab.items():
            if type(index) is not int or index < 0:
                self.fail("id is not a whole number from 0", "model", "vocab", token, got=index)
        highest = max(vocab, key=vocab.__getitem__)
        limit = _HIGHEST if self._rows is None else self._rows
        if vocab[highest] >= limit:
            what = "id is past the model's embedding"
            self.fail(what, "model", "vocab", highest, expected=f"below {limit}", got=vocab[highest])
        if len(set(vocab.values())) < len(vocab):
            seen: dict[int, str] = {}
            for token, index in vocab.items():
                if seen.setdefault(index, token) != token:
                    self.fail(f"duplicate id, also of {seen[index]!r}", "model", "vocab", token, got=index)
        return vocab

    def _pieces(self, model: dict[str, Any]) -> dict[str, int]:
        pieces = model.get("vocab")
        if not isinstance(pieces, list) or not pieces:
            self.fail("is missing or empty", "model", "vocab", expected="pieces with scores")
        vocab: dict[str, int] = {}
        for i, entry in enumerate(pieces):
            fine = isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str)
            if not fine or isinstance(entry[1], bool) or not isinstance(entry[1], int | float):
                self.fail("is not a piece with its score", "model", "vocab", i, got=entry)
            if vocab.setdefault(entry[0], i) != i:
                self.fail("duplicate piece", "model", "vocab", i, got=entry[0])
        size = sum(len(piece.encode("utf-8", "replace")) for piece in vocab)
        if size > _MOST_PIECES:
            self.fail("pieces are too long", "model", "vocab", expected=f"at most {_MOST_PIECES} bytes", got=size)
        unknown = model.get("unk_id")
        if unknown is not None and (type(unknown) is not int or not 0 <= unknown < len(vocab)):
            self.fail("no such piece", "model", "unk_id", expected=f"0 to {len(vocab) - 1}", got=unknown)
        if self._rows is not None and len(vocab) > self._rows:
            what = "more pieces than the model has embeddings"
            self.fail(what, "model", "vocab", expected=self._rows, got=len(vocab))
        return vocab

    def _merges(self, model: dict[str, Any], vocab: dict[str, int]) -> None:
        merges = model.get("merges")
        if not isinstance(merges, list):
            self.fail("is missing or no list", "model", "merges")
        prefix = model.get("continuing_subword_prefix") or ""
        for i, merge in enumerate(merges):
            pair = merge.split(" ") if type(merge) is str else merge
            # Half a million of these: the usual case first, in one line.
            if type(pair) is list and len(pair) == 2 and type(pair[0]) is type(pair[1]) is str:
                left, right = pair
                if left in vocab and right in vocab and left + right.removeprefix(prefix) in vocab and left and right:
                    continue
                if left and right:
                    parts = (left, right, left + right.removeprefix(prefix))
                    unknown = next(part for part in parts if part not in vocab)
                    self.fail("names an unknown token", "model", "merges", i, got=unknown)
            self.fail("is not two tokens", "model", "merges", i, got=merge)

    def _unknown(self, model: dict[str, Any], vocab: dict[str, int], added: list[Any]) -> None:
        unknown = model.get("unk_token")
        if unknown is None or unknown in vocab or any(token["content"] == unknown for token in added):
            return
        if model.get("type") != "WordLevel" or unknown:
            self.fail("no such token", "model", "unk_token", got=unknown)

    def _added(self, added: Any, vocab: dict[str, int]) -> None:
        if added is None:
            return
        if not isinstance(added, list):
            self.fail("is not a list", "added_tokens")
        owners = {index: token for token, index in vocab.items()}
        seen: set[str] = set()
        for i, token in enumerate(added):
            if not isinstance(token, dict):
                self.fail("is not an object", "added_tokens", i)
            content, index = token.get("content"), token.get("id")
            if not isinstance(content, str) or not 0 < len(content) <= _LONGEST:
                self.fail("is empty, too long or no text", "added_tokens", i, "content", got=content)
            if type(index) is not int or not 0 <= index < _HIGHEST:
                self.fail("is no token id", "added_tokens", i, "id", got=index)
            if content in seen:
                self.fail("duplicate token", "added_tokens", i, "content", got=content)
            if owners.setdefault(index, content) != content:
                self.fail(f"duplicate id, also of {owners[index]!r}", "added_tokens", i, "id", got=index)
            if vocab.get(content, index) != index:
                other = vocab[content]
                self.fail("has another id in the vocabulary", "added_tokens", i, "id", expected=other, got=index)
            seen.add(content)

    # -- everything around it

    def _sizes(self, tree: dict[str, Any]) -> None:
        for key in ("truncation", "padding"):
            if not isinstance(tree.get(key), dict | None):
                self.fail("is not an object", key, got=tree[key])
        cut = tree.get("truncation") or {}
        for name in ("max_length", "stride"):
            if name in cut and (type(cut[name]) is not int or cut[name] < 0):
                self.fail("is not a length", "truncation", name, got=cut[name])
        if cut.get("stride", 0) and cut.get("stride", 0) >= cut.get("max_length", _HIGHEST):
            self.fail("is not below max_length", "truncation", "stride", expected=cut["max_length"], got=cut["stride"])

    def _types(self, part: str, node: Any, *at: str | int) -> None:
        if node is None:
            return
        known = _KINDS[part].split()
        if not isinstance(node, dict) or node.get("type") not in known:
            got = node.get("type") if isinstance(node, dict) else type(node).__name__
            self.fail("unknown type", *at, "type", expected=" ".join(known), got=got)
        if node["type"] == "Sequence":
            key = next((key for key in _PARTS if key in node), "")
            if not isinstance(node.get(key), list):
                self.fail("has no list of parts", *at)
            for i, child in enumerate(node[key]):
                if child is None:
                    self.fail("unknown type", *at, key, i, "type", expected=" ".join(known))
                self._types(part, child, *at, key, i)
        elif node["type"] == "FixedLength" and (type(node.get("length")) is not int or node["length"] < 1):
            self.fail("is not a length from 1", *at, "length", got=node.get("length"))
        elif node["type"] == "TemplateProcessing":
            self._template(node, *at)
        pattern = node.get("pattern")
        if isinstance(pattern, dict) and isinstance(pattern.get("Regex"), str) and _NESTED.search(pattern["Regex"]):
            self.fail("repeats what is already repeated", *at, "pattern", "Regex", got=pattern["Regex"])

    def _growth(self, part: str, tree: Any) -> None:
        """No chain of replacements may turn a short text into one that memory cannot hold."""
        growth, nodes = 1.0, [tree]
        while nodes:
            node = nodes.pop()
            if isinstance(node, list):
                nodes += node
            if not isinstance(node, dict):
                continue
            nodes += [node.get(key) for key in _PARTS]
            if node.get("type") == "Precompiled":
                self._charsmap(node.get("precompiled_charsmap"), part)
            added = node.get("content" if node.get("type") == "Replace" else "prepend")
            if isinstance(added, str) and node.get("type") in ("Replace", "Prepend"):
                pattern = node.get("pattern")
                replaced = pattern.get("String") if isinstance(pattern, dict) else None
                growth *= max(1.0, len(added.encode("utf-8", "replace")) / max(1, len(replaced or "")))
        if growth > _MOST_GROWTH:
            self.fail("makes texts too much longer", part, expected=f"at most {_MOST_GROWTH:g} times", got=growth)

    def _charsmap(self, text: Any, part: str) -> None:
        """The table's first four bytes say how long its tree is; the library believes them."""
        try:
            data = base64.b64decode(text or "", validate=True)
        except (ValueError, TypeError):
            self.fail("is not base64", part, "precompiled_charsmap")
        if data and (len(data) < 4 or int.from_bytes(data[:4], "little") > len(data) - 4):
            self.fail("ends before what it announces", part, "precompiled_charsmap", got=len(data))
        longest = max(map(len, data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")))
        if longest > _LONGEST_TEXT:
            most = f"at most {_LONGEST_TEXT} bytes"
            self.fail("makes a character too long", part, "precompiled_charsmap", expected=most, got=longest)

    def _template(self, node: dict[str, Any], *at: str | int) -> None:
        table = node.get("special_tokens")
        if not isinstance(table, dict):
            self.fail("is missing or no object", *at, "special_tokens")
        count = sum(len(e["ids"]) for e in table.values() if isinstance(e, dict) and isinstance(e.get("ids"), list))
        if count > _MOST_AROUND:
            self.fail("puts too many tokens around a text", *at, expected=f"at most {_MOST_AROUND}", got=count)
        for name, entry in table.items():
            for index in entry.get("ids", ()) if isinstance(entry, dict) else ():
                limit = _HIGHEST if self._rows is None else self._rows
                if type(index) is not int or not 0 <= index < limit:
                    self.fail("id is past the model's embedding", *at, "special_tokens", name, got=index)
        for key, name in _template_names(node):
            if name not in table:
                self.fail("names a token that special_tokens lacks", *at, key, got=name)


def _template_names(node: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in ("single", "pair"):
        for step in node.get(key) or ():
            if isinstance(step, dict) and isinstance(step.get("SpecialToken"), dict):
                yield key, step["SpecialToken"].get("id")
