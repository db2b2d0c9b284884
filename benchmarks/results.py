"""The page of results, made of ``benchmarks/results/*.json``.

python -m benchmarks.results
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.claims import CLAIMS, KINDS, Claim
from benchmarks.contest import HERE, LEAST_ROUNDS, spread

HEAD = """\
# Results

Made by `python -m benchmarks.results` of `results/*.json`; not written by hand. `python -m benchmarks.all` measures
(`--list` says what, and how long it takes). Contestants run in turns in one session; a ratio is the median of the
rounds' pairs, with the least and the most. Outputs are compared before anything is timed: see below.
"""


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table of Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows]) + "\n"


def number(x: float) -> str:
    """Three digits, whatever the size."""
    return f"{x:,.0f}" if abs(x) >= 100 else f"{x:.3g}"


def line(claim: Claim, found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A claim and what became of it."""
    asked = f"{KINDS[claim.kind]} {claim.reach:g}"
    result = found.get(claim.result)
    if result is None or (claim.kind != "share" and claim.peer not in result["values"]):
        return [claim.row, claim.peer, "", "", "", asked, "never run"]
    values, unit = result["values"], result["unit"]
    ratio, mine = spread(claim.ratios(result)), spread(values[claim.mine])["median"]
    if claim.kind == "share":
        other = f"{spread(result['limit']['bytes_per_s'])['median'] / 1e9:.1f} GB/s"
    else:
        other = f"{number(spread(values[claim.peer])['median'])} {unit}"
    verdict = "yes" if claim.met(ratio["median"]) else "**no**"
    if len(values[claim.mine]) < LEAST_ROUNDS:
        verdict += f" ({len(values[claim.mine])} rounds: too few)"
    span = f"{ratio['median']:.2f} ({ratio['least']:.2f} to {ratio['most']:.2f})"
    return [claim.row, claim.peer, f"{number(mine)} {unit}", other, span, asked, verdict]


def outputs(found: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """What was compared, result by result."""
    rows = []
    for name, result in found.items():
        for who, said in result.get("agree", {}).items():
            if isinstance(said, str):
                rows.append([name, who, said, "", ""])
            else:
                rows.append(
                    [
                        name,
                        who,
                        f"{said['same']} of {said['of']}",
                        f"{said['logp']:.1e}",
                        f"{said['mean']:.1e}" if "mean" in said else "",
                    ]
                )
    return rows


def measured_on(found: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Where, when, and with what."""
    rows = []
    for name, result in found.items():
        machine = result["machine"]
        versions = sorted({facts["version"] for facts in result.get("facts", {}).values() if "version" in facts})
        where = f"{machine['processor']}, {machine['threads']} of {machine['cores']} cores"
        rounds = str(max(map(len, result["values"].values())) if "values" in result else result.get("rounds", ""))
        rows.append([name, machine["date"], where, f"{machine['load']:.1f}", rounds, "; ".join(versions)])
    return rows


def page(found: Mapping[str, Mapping[str, Any]], folder: Path) -> str:
    """All of it."""
    rows = [line(claim, found) for claim in CLAIMS]
    head = ["row", "peer", "cutaway", "peer's", "ratio", "asked for", "met"]
    parts = [HEAD, table(head, rows)]
    parts.append("`first token`'s ratio is of the time of `import torch` and 1.5 times the peer's.\n")
    parts.append("## Cost\n")
    charts = sorted(folder.glob("growth-*.svg"))
    parts += [f"![{chart.stem}](results/{chart.name})\n" for chart in charts] or ["Never run.\n"]
    parts.append("## GPU\n")
    gpu = folder / "gpu.md"
    parts.append(gpu.read_text() if gpu.exists() else "`gpu.sh` has never run on a CUDA machine.\n")
    parts.append("## Outputs\n")
    parts.append(
        "The likeliest token after each token of a text, and how far the text's log-probabilities differ at most,\n"
        "from plain PyTorch in fp32 over the dequantised weights. In 8 and 4 bits llama.cpp and\n"
        "CTranslate2 round activations.\n"
    )
    parts.append(
        table(["result", "who", "the same likeliest token", "log-probability, at most", "on average"], outputs(found))
    )
    parts.append("## Measured on\n")
    parts.append(table(["result", "date", "processor", "load", "rounds", "versions"], measured_on(found)))
    return "\n".join(parts)


def main() -> None:
    """Read, write."""
    folder = HERE / "results"
    found = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    (HERE / "RESULTS.md").write_text(page(found, folder))
    print(HERE / "RESULTS.md")


if __name__ == "__main__":
    main()
