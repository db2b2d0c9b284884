"""A session that a call goes on with: what its prompt begins with as that does is not read again.

a conversation:  system, question │ answer │ question │ …
read by a call:  ├───── first ────────────┤├─ second ──┤
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cutaway.errors import RequestError
from cutaway.generation.sampling import Sampling
from cutaway.generation.session import Session
from cutaway.models import Transformer


def ongoing(session: object, model: Transformer, sampling: Sampling, prompts: int) -> Session | None:
    """The session that a call names, if it is any use there.

    Args:
        session: a :class:`Session` of one row, or None.
        model: what answers.
        sampling: how.
        prompts: how many.

    Raises:
        RequestError: it is no session, another model's or another kind of call's, or there is more than one answer.
    """
    if session is None:
        return None
    if not isinstance(session, Session):
        hint = "cutaway.Session(model.transformer), or cutaway.Session.load(model.transformer, FILE)"
        raise RequestError("no session", field="session", expected="a cutaway.Session", got=session, hint=hint)
    if session.model is not model:
        raise RequestError("another model has read it", field="session", hint="Session(model.transformer)")
    if model.spec.source is not None:
        raise RequestError("an encoder–decoder's answers go on with none", field="session", got=model.spec.family)
    if (prompts, sampling.n, sampling.num_beams, len(session.tokens)) != (1, 1, 1, 1):
        found = f"{prompts} prompts, n={sampling.n}, num_beams={sampling.num_beams}, {len(session.tokens)} rows"
        hint = "session.fork([row]) makes a session of one row for each answer."
        raise RequestError(
            "goes on with one answer at a time", field="session", expected="1 each", got=found, hint=hint
        )
    if session.steady is not sampling.deterministic:
        hint = f"Session(…, steady={sampling.deterministic}), or deterministic={session.steady}"
        raise RequestError(
            "what it has read has other bits", field="session", got=f"steady={session.steady}", hint=hint
        )
    if sampling.kv_dtype not in (None, session.kv_dtype):
        hint = f'Session(…, kv_dtype="{sampling.kv_dtype}"), or no kv_dtype here'
        raise RequestError(
            "keeps another type", field="session", expected=sampling.kv_dtype, got=session.kv_dtype, hint=hint
        )
    return session


@contextmanager
def held(session: Session | None) -> Iterator[None]:
    """Nobody else's meanwhile.

    Raises:
        RequestError: it is another call's.
    """
    if session is None:
        yield
        return
    if session.busy:
        hint = "End that one first (a stream has close), or give each a fork."
        raise RequestError("another call is going on with it", field="session", hint=hint)
    between, session.busy = session.between, True
    try:
        yield
    finally:
        session.between, session.busy = between, False
