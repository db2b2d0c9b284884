"""The tokenizer of a model folder: tokenizer.json and the files beside it."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

import tokenizers
from cutaway.errors import CutawayError, StorageError, TokenizerError
from cutaway.formats.strict_json import parse_json, pointer
from cutaway.tokenizers.check import check_tokenizer_json
from cutaway.tokenizers.rust import rust_errors
from cutaway.tokenizers.settings import ROLES, Settings
from cutaway.tokenizers.tokenizer import Tokenizer
from tokenizers import AddedToken

__all__ = ["from_folder"]

LIMIT = 64 << 20
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def from_folder(folder: str | PathLike[str], *, vocab_rows: int | None = None, limit: int = LIMIT) -> Tokenizer | None:
    """The folder's tokenizer, or None if it has no tokenizer.json.

    Args:
        vocab_rows: rows of the model's embedding; a vocabulary that reaches past them is refused.
        limit: bytes of tokenizer.json.

    Errors: TokenizerError with a JSON pointer; LimitExceeded.
    """
    root = Path(folder)
    data = _read(root, "tokenizer.json", limit)
    if data is None:
        return None
    path = str(root / "tokenizer.json")
    tree = parse_json(data, path=path, limit=limit, error=TokenizerError)
    check_tokenizer_json(tree, path=path, rows=vocab_rows)
    with rust_errors("is not a tokenizer", path=path):
        backend = tokenizers.Tokenizer.from_buffer(data)
        backend.no_truncation()
        backend.no_padding()
        if isinstance(backend.model, tokenizers.models.BPE):
            backend.model.dropout = None  # a training aid that makes ids random
    assert isinstance(tree, dict)
    _check_ids(backend, tree, path)

    settings = Settings(root, _read)
    _declare(backend, settings, vocab_rows)
    special = {t.content: i for i, t in backend.get_added_tokens_decoder().items() if t.special}
    roles = {name: text for name in ROLES if (text := settings.role(name)) is not None}
    ids = {name: index for name, text in roles.items() if (index := backend.token_to_id(text)) is not None}
    for name, index in ids.items():
        if name in ("bos_token", "eos_token") and vocab_rows is not None and index >= vocab_rows:
            raise TokenizerError("id is past the model's embedding", path=settings.path, field=pointer(name), got=index)
    prefix, suffix = _around(backend, settings, ids)
    template = settings.template()
    unknown = ids.get("unk_token")
    return Tokenizer(
        backend,
        special=special,
        bos_id=ids.get("bos_token", ids.get("cls_token")),
        eos_ids=[ids["eos_token"]] if "eos_token" in ids else [],
        pad_id=ids.get("pad_token"),
        unk_id=_model_unknown(backend) if unknown is None else unknown,
        prefix=prefix,
        suffix=suffix,
        chat_template=None if isinstance(template, CutawayError) else template,
        template_error=template if isinstance(template, CutawayError) else None,
        names={**roles, **settings.named_extras()},
        rows=vocab_rows,
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


def _declare(backend: Any, settings: Settings, rows: int | None) -> None:
    """Bring in what only the settings declare: added tokens, and which tokens are control tokens."""
    for index, token in sorted(settings.declared(), key=lambda entry: entry[0]):
        content = token["content"]
        known = backend.id_to_token(index)
        if known is None and backend.token_to_id(content) is None and (rows is None or index < rows):
            flags = {key: token[key] for key in FLAGS if key in token}
            if not all(isinstance(flag, bool) for flag in flags.values()):
                raise settings.fail("has a flag that is none", "added_tokens_decoder", str(index))
            backend.add_tokens([AddedToken(content, **flags)])
            known = backend.id_to_token(index)
        if known != content and (rows is None or index < rows):
            what = f"disagrees with tokenizer.json, which has {known!r}"
            raise settings.fail(what, "added_tokens_decoder", str(index), got=content)
    named = [text for name in ROLES if (text := settings.role(name)) is not None]
    eos = settings.role("eos_token")
    if eos is not None and backend.token_to_id(eos) is None:
        raise settings.fail("no such token", "eos_token", got=eos)
    flagged = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    missing = []
    for text in [*named, *settings.extras()]:
        old = flagged.get(text)
        if backend.token_to_id(text) is None or (old is not None and old.special):
            continue
        flags = {} if old is None else {key: getattr(old, key) for key in ("single_word", "lstrip", "rstrip")}
        missing.append(AddedToken(text, special=True, normalized=bool(old and old.normalized), **flags))
    with rust_errors("control tokens cannot be declared", path=settings.path):
        backend.add_special_tokens(missing)


def _around(backend: Any, settings: Settings, ids: dict[str, int]) -> tuple[list[int], list[int]]:
    """The ids that the file's own rule puts before and after a text."""
    bos, eos = settings.flag("add_bos_token"), settings.flag("add_eos_token")
    if bos is not None or eos is not None:  # then they are the rule, and the post-processor is not
        if bos and "bos_token" not in ids:
            raise settings.fail("is missing, yet every text begins with it", "bos_token")
        if eos and "eos_token" not in ids:
            raise settings.fail("is missing, yet every text ends with it", "eos_token")
        return [ids["bos_token"]] if bos else [], [ids["eos_token"]] if eos else []
    with rust_errors("is not understood", field="/post_processor"):
        bare = backend.encode("a", add_special_tokens=False).ids
        full = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start], full[start + len(bare) :]
    return [], []


def _model_unknown(backend: Any) -> int | None:
    token = getattr(backend.model, "unk_token", None)
    index: int | None = None if token is None else backend.token_to_id(token)
    return index
