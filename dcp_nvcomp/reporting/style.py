"""How the page looks: one style sheet, for light and dark, wide and narrow."""

from __future__ import annotations

STYLE = """
:root {
  color-scheme: light dark;
  --back: #ffffff; --panel: #f6f7f9; --text: #1d2430; --dim: #5d6675; --line: #d9dde4;
  --hot: #c2410c; --hot-text: #ffffff; --size: #2e7d4f; --cold: #eef0f3;
}
@media (prefers-color-scheme: dark) {
  :root {
    --back: #14171c; --panel: #1c2128; --text: #e4e8ee; --dim: #97a1b0; --line: #333a45;
    --hot: #e8590c; --hot-text: #ffffff; --size: #3f9d68; --cold: #262c35;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 68rem; padding: 1.5rem 1rem 3rem; background: var(--back); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif;
}
h1 { font-size: 1.35rem; margin: 0; }
h2 { font-size: 1.05rem; margin: 2.2rem 0 .3rem; }
p { margin: .3rem 0; }
.path { color: var(--dim); overflow-wrap: anywhere; font-family: ui-monospace, monospace; font-size: .85rem; }
.facts { display: flex; flex-wrap: wrap; gap: .6rem; margin: 1.1rem 0 .9rem; padding: 0; }
.facts div { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: .45rem .9rem; }
.facts dt { color: var(--dim); font-size: .8rem; }
.facts dd { margin: 0; font-size: 1.15rem; font-variant-numeric: tabular-nums; }
.finding { border-left: 4px solid var(--size); background: var(--panel); padding: .6rem .9rem; border-radius: 4px; }
.finding.slow { border-left-color: var(--hot); }
.dim { color: var(--dim); font-size: .88rem; }
.scroll { overflow-x: auto; }
table { border-collapse: separate; border-spacing: 2px; font-variant-numeric: tabular-nums; margin: .5rem 0; }
th { text-align: right; font-weight: 500; color: var(--dim); font-size: .85rem; padding: .2rem .6rem; }
th:first-child, td:first-child { text-align: left; }
td { text-align: right; padding: .25rem .6rem; white-space: nowrap; border-radius: 4px; }
td.heat { background: color-mix(in srgb, var(--tone) calc(var(--v) * 100%), var(--cold)); min-width: 5.5rem; }
td.heat.strong { color: var(--hot-text); }
td.time { --tone: var(--hot); }
td.size { --tone: var(--size); line-height: 1.25; }
td.size small { display: block; opacity: .85; }
td.none { background: var(--cold); color: var(--dim); }
.strip { display: grid; grid-template-columns: 5.5rem 1fr; gap: .7rem .6rem; align-items: start;
  margin: .5rem 0; }
.strip > span { color: var(--dim); font-size: .85rem; text-align: right; }
.cells { display: flex; flex-wrap: wrap; gap: 2px; }
.cells i {
  width: 14px; height: 14px; border-radius: 3px;
  background: color-mix(in srgb, var(--hot) calc(var(--v) * 100%), var(--cold));
}
.legend { display: flex; align-items: center; gap: .5rem; color: var(--dim); font-size: .85rem; margin: .4rem 0; }
.legend b {
  width: 9rem; height: .7rem; border-radius: 3px; background: linear-gradient(90deg, var(--cold), var(--hot));
}
@media (max-width: 36rem) {
  .strip { grid-template-columns: 1fr; }
  .strip > span { text-align: left; }
  td, th { padding: .2rem .4rem; }
  td.heat { min-width: 4rem; }
}
"""
