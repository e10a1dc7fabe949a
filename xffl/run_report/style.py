"""The look of a report's page: light and dark, on screen and on paper."""

from __future__ import annotations

__all__ = ["STYLE"]

STYLE = """\
:root { color-scheme: light dark; --back: #ffffff; --ink: #1b1f24; --muted: #59626c; --line: #d5dae0; --band: #f4f6f8;
  --link: #0060a0; --warn: #fdf3dc; --warn-line: #e0b040; }
@media (prefers-color-scheme: dark) { :root { --back: #14171b; --ink: #e6e9ed; --muted: #a3acb6; --line: #39414a;
  --band: #1d2228; --link: #7cc4f5; --warn: #33290f; --warn-line: #8c6d00; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1.25rem 4rem; max-width: 72rem; background: var(--back); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .2rem; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 2.2rem 0 .7rem; padding-bottom: .2rem; border-bottom: 1px solid var(--line); }
h3 { font-size: 1.05rem; margin: 1.4rem 0 .4rem; overflow-wrap: anywhere; }
p.under { color: var(--muted); margin: 0 0 1rem; overflow-wrap: anywhere; }
a { color: var(--link); }
nav { display: flex; flex-wrap: wrap; gap: .2rem 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
div.wide { overflow-x: auto; }
th, td { text-align: left; vertical-align: top; padding: .28rem .9rem .28rem .45rem;
  border-bottom: 1px solid var(--line); overflow-wrap: break-word; min-width: 4.5rem; }
thead th { color: var(--muted); font-weight: 600; }
tbody th { font-weight: 500; }
td.number, th.number { text-align: right; white-space: nowrap; }
tr.differs > * { background: var(--warn); }
code { font: 13px/1.5 ui-monospace, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; }
ul.notes { margin: .6rem 0; padding: .6rem 1rem .6rem 2rem; background: var(--warn);
  border-left: 4px solid var(--warn-line); }
figure { margin: 1rem 0 1.6rem; break-inside: avoid; }
figure img { display: block; max-width: 100%; height: auto; background: #ffffff; border: 1px solid var(--line);
  border-radius: 4px; padding: 6px; }
figcaption { color: var(--muted); font-size: .9rem; margin-top: .35rem; max-width: 62rem; overflow-wrap: anywhere; }
span.swatch { display: inline-block; width: 1.6rem; height: 0; border-top: 4px solid; margin-right: .5rem;
  vertical-align: middle; }
@media print { :root { --back: #ffffff; --ink: #000000; --muted: #444444; --line: #bbbbbb; --band: #ffffff;
  --link: #000000; --warn: #f3f3f3; --warn-line: #999999; } body { max-width: none; padding: 0; font-size: 10pt; }
  nav { display: none; } h2, h3 { break-after: avoid; } tr { break-inside: avoid; } div.wide { overflow: visible; } }
"""
"""CSS without a single address: nothing is fetched."""
