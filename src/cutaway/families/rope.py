"""Rotary positions in configs, in both of today's spellings.

The newer one nests everything in ``rope_parameters``; the older one has ``rope_theta`` (and, in some families, a
share of the head) beside ``rope_scaling``.
"""

from __future__ import annotations

import math
from typing import Any

from cutaway.families.rope_scaling import read_scaling, write_scaling
from cutaway.formats.config import ConfigReader
from cutaway.spec import RotarySpec

SHARE = "partial_rotary_factor"


def read_rotary(
    c: ConfigReader,
    d_head: int,
    max_positions: int,
    *,
    base: float = 10000.0,
    share: float | None = None,
    interleaved: bool = False,
    original: int | None = None,
) -> RotarySpec:
    """The rotary positions that a config states.

    Args:
        c: the config.
        d_head: width of a head.
        max_positions: what a scaling's original length is when it states none.
        base: the family's default.
        share: the family's default share of the head that turns; None where it is always the whole head.
        interleaved: a pair is two neighbouring channels.
        original: the family's default length before lengthening; None where that is ``max_positions``.
    """
    outer_base, outer_share = c.number("rope_theta", None, above=0), None
    if share is not None:
        outer_share = c.number(SHARE, None, above=0, high=1)
    original = c.integer("original_max_position_embeddings", original, high=1 << 40)
    c.keep("original_max_position_embeddings")  # what uses it has it in its own section too

    def read(section: ConfigReader) -> RotarySpec:
        theta = section.number("rope_theta", base if outer_base is None else outer_base, above=0)
        if share is None:
            section.fixed(SHARE, (1.0, None), None)
            stated = 1.0
        else:
            stated = section.number(SHARE, share if outer_share is None else outer_share, above=0, high=1)
        width = int(d_head * stated)
        if width < 2 or width % 2:
            at, key, got = (c, "head_dim", d_head) if share is None else (section, SHARE, stated)
            wanted = "an even number of a head's channels, at least 2"
            raise at.error(key, "rotary positions need an even width", expected=wanted, got=got)
        return RotarySpec(theta, width, read_scaling(section, width, max_positions, original), interleaved)

    sections = [c.section("rope_parameters"), c.section("rope_scaling")]
    found = [read(section) for section in sections if section is not None]
    if not found:
        return read(ConfigReader({}))
    spec = found[0]
    if found[-1] != spec:
        raise c.error("rope_scaling", "differs from rope_parameters")
    if outer_base is not None and outer_base != spec.base:
        raise c.error("rope_theta", "differs from rope_parameters/rope_theta", expected=spec.base, got=outer_base)
    if outer_share is not None and int(d_head * outer_share) != spec.d_rotary:
        raise c.error(SHARE, f"differs from rope_parameters/{SHARE}", expected=spec.d_rotary / d_head, got=outer_share)
    return spec


def read_rotary_section(c: ConfigReader, d_rotary: int, max_positions: int, *, base: float) -> RotarySpec:
    """One ``rope_parameters`` object, of layers that turn whole heads."""
    theta = c.number("rope_theta", base, above=0)
    return RotarySpec(theta, d_rotary, read_scaling(c, d_rotary, max_positions))


def write_rotary(spec: RotarySpec, d_head: int | None = None) -> dict[str, Any]:
    """The ``rope_parameters`` object of a spec.

    Args:
        spec: the rotary positions.
        d_head: width of a head, where the family states the share of it that turns.
    """
    out = {**write_scaling(spec.scaling), "rope_theta": spec.base}
    if d_head is None:
        return out
    share = spec.d_rotary / d_head
    if int(d_head * share) < spec.d_rotary:  # rounded down: 44 · (30 / 44) is less than 30
        share = math.nextafter(share, 1.0)
    return {**out, SHARE: share}
