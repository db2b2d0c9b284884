"""The tokenizer of a model folder: tokenizer.json, or what folders had before it, and the files beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import tokenizers
from cutaway.errors import StorageError, TokenizerError
from cutaway.formats.strict_json import parse_json, pointer
from cutaway.tokenizers.around import Around, around_of
from cutaway.tokenizers.check import check_tokenizer_json
from cutaway.tokenizers.cutter import Source
from cutaway.tokenizers.legacy import legacy
from cutaway.tokenizers.marian import from_marian
from cutaway.tokenizers.plain import plain_model
from cutaway.tokenizers.rust import rust_errors
from cutaway.tokenizers.settings import FLAGS, ROLES, Settings
from cutaway.tokenizers.tokenizer import Tokenizer
from tokenizers import AddedToken

__all__ = ["from_folder"]

LIMIT = 64 << 20


def from_folder(folder: str | PathLike[str], *, vocab_rows: int | None = None, limit: int = LIMIT) -> Tokenizer | None:
    """The folder's tokenizer, or None if it has none.

    Args:
        vocab_rows: rows of the model's embedding; a vocabulary that reaches past them is refused.
        limit: bytes of the vocabulary's file.

    Errors: TokenizerError with the place in the file; LimitExceeded.
    """
    root = Path(folder)
    data = _read(root, "tokenizer.json", limit)
    settings = Settings(root, _read)
    if data is not None:
        path = str(root / "tokenizer.json")
        tree = parse_json(data, path=path, limit=limit, error=TokenizerError)
        return _tokenizer(data, tree, path, settings, vocab_rows)
    found = from_marian(root, _read, settings, rows=vocab_rows, limit=limit)
    if found is not None:
        return found
    old = legacy(root, _read, settings, limit)
    if old is None:
        return None
    return _tokenizer(json.dumps(old.tree).encode(), old.tree, old.path, settings, vocab_rows, old.roles)


def _tokenizer(
    data: bytes, tree: Any, path: str, settings: Settings, rows: int | None, usual: Mapping[str, str] | None = None
) -> Tokenizer:
    """The tokenizer of a tokenizer.json. ``usual``: the tokens with a role that the settings are silent about."""
    check_tokenizer_json(tree, path=path, rows=rows)
    with rust_errors("is not a tokenizer", path=path):
        backend = tokenizers.Tokenizer.from_buffer(data)
        backend.no_truncation()
        backend.no_padding()
        if isinstance(backend.model, tokenizers.models.BPE):
            backend.model.dropout = None  # a training aid that makes ids random
    _check_ids(backend, tree, path)

    roles = {name: text for name in ROLES if (text := settings.role(name)) is not None}
    roles = {**(usual or {}), **roles}
    _declare(backend, settings, roles, rows)
    special = {t.content: i for i, t in backend.get_added_tokens_decoder().items() if t.special}
    ids = {name: index for name, text in roles.items() if (index := backend.token_to_id(text)) is not None}
    for name, index in ids.items():
        if name in ("bos_token", "eos_token") and rows is not None and index >= rows:
            raise TokenizerError("id is past the model's embedding", path=settings.path, field=pointer(name), got=index)
    unknown = ids.get("unk_token")
    return Tokenizer(
        backend,
        special=special,
        bos_id=ids.get("bos_token", ids.get("cls_token")),
        eos_ids=[ids["eos_token"]] if "eos_token" in ids else [],
        pad_id=ids.get("pad_token"),
        unk_id=_model_unknown(backend, tree) if unknown is None else unknown,
        cls_id=ids.get("cls_token"),
        sep_id=ids.get("sep_token"),
        mask_id=ids.get("mask_token"),
        around=_around(backend, settings, ids),
        template=settings.template(),
        names={**roles, **settings.named_extras()},
        rows=rows,
        source=Source(backend, plain_model(tree, special)),
        # Not for BPE, as in the reference: there it would change what was written.
        tidies=settings.flag("clean_up_tokenization_spaces") is True and "merges" not in tree["model"],
    )


def _read(root: Path, name: str, limit: int) -> bytes | None:
    # Imported late: files.py brings torch along, which nobody needs who only wants ids.
    from cutaway.formats.files import read_small, resolve_inside

    path = resolve_inside(root, name, error=TokenizerError)
    if not path.exists() and not path.is_symlink():
        if not root.is_dir():
            raise StorageError("is not a folder", path=root)
        return None
    return read_small(path, limit=limit)


def _check_ids(backend: Any, tree: dict[str, Any], path: str) -> None:
    """The library numbers added tokens itself and does not mind that the file says otherwise."""
    for i, token in enumerate(tree.get("added_tokens") or ()):
        got = backend.token_to_id(token["content"])
        if got != token["id"]:
            field = pointer("added_tokens", i, "id")
            raise TokenizerError("id cannot be reached", path=path, field=field, expected=got, got=token["id"])


def _declare(backend: Any, settings: Settings, roles: Mapping[str, str], rows: int | None) -> None:
    """Bring in what only the settings declare: added tokens, and which tokens are control tokens."""
    for index, token in sorted(settings.declared(), key=lambda entry: entry[0]):
        content = token["content"]
        known = backend.id_to_token(index)
        if known is None and backend.token_to_id(content) is None and (rows is None or index < rows):
            flags = {key: token[key] for key in (*FLAGS, "special") if key in token}
            if not all(isinstance(flag, bool) for flag in flags.values()):
                raise settings.fail("has a flag that is none", "added_tokens_decoder", str(index))
            backend.add_tokens([AddedToken(content, **flags)])
            known = backend.id_to_token(index)
        if known != content and (rows is None or index < rows):
            what = f"disagrees with the vocabulary, which has {known!r}"
            raise settings.fail(what, "added_tokens_decoder", str(index), got=content)
    eos = settings.role("eos_token")
    if eos is not None and backend.token_to_id(eos) is None:
        raise settings.fail("no such token", "eos_token", got=eos)
    flagged = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    said = {text: settings.role_flags(name) for name, text in roles.items()}
    missing = []
    for text in dict.fromkeys([*roles.values(), *settings.extras()]):
        old = flagged.get(text)
        if backend.token_to_id(text) is None or (old is not None and old.special):
            continue
        flags = said.get(text, {}) if old is None else {key: getattr(old, key) for key in FLAGS}
        missing.append(AddedToken(text, special=True, **({"normalized": False} | flags)))
    with rust_errors("control tokens cannot be declared", path=settings.path):
        backend.add_special_tokens(missing)


def _around(backend: Any, settings: Settings, ids: dict[str, int]) -> Around:
    """The ids that the file's own rule puts around a text, and around two."""
    bos, eos = settings.flag("add_bos_token"), settings.flag("add_eos_token")
    if bos is None and eos is None:
        return around_of(backend)
    # Then they are the rule, and the post-processor is not.
    for flag, name, where in ((bos, "bos_token", "begins"), (eos, "eos_token", "ends")):
        if flag and name not in ids:
            raise settings.fail(f"is missing, yet every text {where} with it", name)
    return Around.marked([ids["bos_token"]] if bos else [], [ids["eos_token"]] if eos else [])


def _model_unknown(backend: Any, tree: dict[str, Any]) -> int | None:
    index: int | None
    if tree["model"].get("type") == "Unigram":
        index = tree["model"].get("unk_id")
        return index
    token = getattr(backend.model, "unk_token", None)
    index = None if token is None else backend.token_to_id(token)
    return index
