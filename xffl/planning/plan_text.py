"""What ``xffl plan`` prints of a round's traffic, of forecasts, and of a rank's memory, from calculated numbers."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from xffl.planning.text import bytes_text, seconds_text

__all__ = ["assumption_lines", "forecast_lines", "memory_lines", "startup_lines", "traffic_lines"]

PHASES = (
    ("vote", "both votes, over all ranks"),
    ("pack", "values are checked"),
    ("fill", "until the slow link starts"),
    ("across", "the slow link is busy"),
    ("stall", "it waits, between buckets"),
    ("drain", "the last buckets arrive and are broadcast inside the cells"),
    ("commit", "new values are written"),
)
COLUMNS = ("parameters", "gradients", "optimizer", "gathered", "round", "total", "sends")


def traffic_lines(traffic: dict[str, Any]) -> list[str]:
    """Write the bytes of a round, of all cells and of a sender in each kind of cell."""
    lines = ["", f"Traffic of a round, for a model of {bytes_text(traffic['model_bytes'])}:"]
    for name, form in (("all-gather", traffic["all_gather"]), ("two-hop", traffic["two_hop"])):
        took = ""
        if form["seconds"] is not None:
            took = f"; {seconds_text(form['seconds'])} at {traffic['link_gbps']:g} Gbit/s"
        sent = f"each cell sends {bytes_text(form['bytes_per_cell'])}, all cells {bytes_text(form['bytes_total'])}"
        lines.append(f"  {name:<10}  {sent}{took}")
    lines.append(f"  intra-cell  all cells send {bytes_text(traffic['home_bytes_total'])} between their replicas")
    for kind in traffic["cell_kinds"]:
        names = ("all_gather_bytes_per_sender", "two_hop_bytes_per_sender", "home_bytes_per_sender")
        gathered, hopped, home = (bytes_text(kind[name]) for name in names)
        text = f"{gathered} with all-gather, {hopped} with two-hop, {home} inside the cell"
        lines.append(f"  a sender in a cell of {kind['ranks']}: {text}")
    if "moments" in traffic:
        moments = traffic["moments"]
        named = ", ".join(f"{name} every {period}" for name, period in moments["periods"].items())
        more, most = (bytes_text(moments[name]) for name in ("mean_bytes", "most_bytes"))
        lines.append(f"  moments     {named} rounds: as if the model had {more} more in the mean, {most} at most")
    lines += pcie_lines(traffic["pcie"]) if "pcie" in traffic else []
    return lines


def startup_lines(startup: dict[str, Any]) -> list[str]:
    """Write what ranks ask of rank 0's store, how many connections they open, and what a vote takes."""
    asked, nbytes = startup["requests"], bytes_text(startup["store_bytes"])
    sent = bytes_text(startup["vote_bytes"])
    return [
        "",
        f"Start-up of {startup['ranks']} ranks in {startup['cells']} cells, over gloo:",
        f"  rank 0's store  {asked} requests, {nbytes}, {startup['store_connections']} connections",
        f"  connections     {startup['connections']} of the rank that has most, to other ranks",
        f"  a vote          {startup['vote_messages']} messages and {sent} of the rank that sends most, "
        f"{startup['vote_steps']} messages one after the other",
    ]


def pcie_lines(pcie: dict[str, Any]) -> list[str]:
    """Write what ranks copy between their GPU and the host's memory."""
    lines = [
        f"  host memory all ranks copy {bytes_text(pcie['bytes_total'])} over PCIe, at {pcie['gbps']:g} Gbit/s each"
    ]
    for kind in pcie["cell_kinds"]:
        for role in ("sender", "replica"):
            if (copies := kind[role]) is not None:
                out, back = (bytes_text(copies[name]) for name in ("bytes_to_host", "bytes_to_gpu"))
                took = seconds_text(copies["seconds"])
                lines.append(f"  a {role} in a cell of {kind['ranks']}: {out} to the host, {back} to the GPU; {took}")
    return lines


def forecast_lines(forecast: dict[str, Any]) -> list[str]:
    """Write the time of a round by phases, and that of data parallelism for comparison."""
    round_, plain = forecast["round"], forecast["data_parallel"]
    form = round_["form"].replace("_", "-")
    lines = ["", f"Forecast of a round every {forecast['every']} steps of {forecast['step_s']:g} s:"]
    lines.append(f"  takes       {seconds_text(round_['seconds'])} ({form}, codec {forecast['codec']}), of which")
    lines += [f"    {phase:<7}   {seconds_text(round_['phases'][phase]):<8}  {meaning}" for phase, meaning in PHASES]
    sent = bytes_text(round_["bytes_across_per_cell"])
    lines.append(f"  exposes     {seconds_text(round_['exposed'])}; each cell sends {sent}")
    lines.append(f"  training    {100 * round_['utilization']:.1f} % of the time")
    if round_["phases"]["stall"] > 0.05 * round_["phases"]["across"]:
        lines.append(
            "  The slow link waits for buckets: larger ones would fill it (--bucket-mib, Aggregator's bucket_bytes)."
        )
    lines += codec_lines(forecast["codecs"])
    lines.append("Data parallelism over all ranks instead, gradients in every step:")
    sent = bytes_text(plain["bytes_across_per_cell"])
    lines.append(
        f"  exposes     {seconds_text(plain['exposed'])} of {seconds_text(plain['seconds'])}; each cell sends {sent}"
    )
    lines.append(f"  training    {100 * plain['utilization']:.1f} % of the time")
    return lines


def codec_lines(limits: Mapping[str, float]) -> list[str]:
    """Write below which rate of a link each codec pays; nothing for one cell."""
    if not limits:
        return []
    text = ", ".join(f"{name} {limit:.3g}" for name, limit in limits.items())
    return ["  codecs pay  on links of the cells below so many Gbit/s:", f"    {text}"]


def assumption_lines(assumptions: Sequence[str]) -> list[str]:
    """Lay assumptions out as a list that fills the terminal."""
    width = shutil.get_terminal_size((100, 24)).columns
    lines = ["Assumed:"]
    for assumption in assumptions:
        lines += textwrap.wrap(assumption, width, initial_indent="  - ", subsequent_indent="    ")
    return lines


def memory_lines(inside: dict[str, Any]) -> list[str]:
    """Write the memory of a rank, its traffic inside the cell, and both for other strategies."""
    name = inside["strategy"] + (f", ZeRO {inside['zero_stage']}" if inside["zero_stage"] else "")
    lines = ["", f"Memory of a rank in cell {inside['cell']} ({name}), beside activations:"]
    lines += part_lines(inside["memory"])
    lines.append(f"  {'total':<12}  {known(inside['total_bytes'])}")
    lines += ["", "A rank sends inside the cell, in a forward and backward pass:"]
    lines += part_lines(inside["traffic"]) or ["  nothing"]
    lines += ["", "With P parameters, U of them (P / pp / tp) on a stage, cut over n = dp_shard x cp ranks,"]
    lines += ["R = dp_replicate, t = tp, c = cp, tokens = batch x sequence / cp.", "", "Strategies for this cell:"]
    width = max(map(len, inside["strategies"]))
    columns = [name for name in COLUMNS if any(name in row for row in inside["strategies"].values())]
    lines.append("  " + " " * width + "".join(name.rjust(12) for name in columns))
    for label, row in inside["strategies"].items():
        lines.append("  " + label.ljust(width) + "".join(known(row[name]).rjust(12) for name in columns))
    return lines


def part_lines(parts: list[dict[str, Any]]) -> list[str]:
    """Write parts of memory or traffic, each with its formula."""
    return [f"  {part['what']:<12}  {known(part['bytes']):<8}  {part['formula']}" for part in parts]


def known(count: float | None) -> str:
    """Write a number of bytes, also one that is not known."""
    return "?" if count is None else bytes_text(count)
