"""How a page looks, in daylight and in the dark."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --page: #f5f6f8; --panel: #fff; --ink: #1b1f24; --muted: #566069; --line: #d8dde3;
  --track: #eceff3; --good: #1f7a46; --bad: #b3261e; --on: #fff; --weights: #3567ac; --gradients: #c46f12;
  --optimizer: #2f8558; --saved: #8a4fa8; --rest: #7d8893; --forward-again: #1d3f73; --backward-again: #86470a; }
@media (prefers-color-scheme: dark) {
  :root { --page: #121519; --panel: #1b2026; --ink: #e7eaed; --muted: #a3adb8; --line: #363e48; --track: #272e36;
    --good: #6fce98; --bad: #ff8a7d; --on: #10141a; --weights: #73a7ec; --gradients: #efa04a; --optimizer: #6fc692;
    --saved: #c490de; --rest: #84909d; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI",
  Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 24px 20px 48px; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 0 0 12px; }
p { margin: 0 0 8px; }
section { background: var(--panel); border: 1px solid var(--line); border-radius: 10px; padding: 16px 18px;
  margin-top: 16px; }
.lead { color: var(--muted); overflow-wrap: anywhere; }
.note { color: var(--muted); font-size: .9rem; margin: 10px 0 0; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(200px, 1fr)); gap: 12px; margin-top: 16px; }
.card { background: var(--panel); border: 1px solid var(--line); border-radius: 10px; padding: 12px 14px; }
.card b { display: block; font-size: 1.25rem; line-height: 1.3; }
.card span { color: var(--muted); font-size: .9rem; overflow-wrap: anywhere; }
.card.good b { color: var(--good); }
.card.bad b, .over { color: var(--bad); }
.row { display: grid; grid-template-columns: minmax(90px, 150px) 1fr 215px; column-gap: 12px; align-items: center;
  padding: 2px 0; }
.tall .row { padding: 5px 0; }
.label { overflow-wrap: anywhere; line-height: 1.25; font-size: .92rem; }
.strip { min-width: 0; line-height: 0; }
.figure { font-size: .88rem; line-height: 1.25; font-variant-numeric: tabular-nums; color: var(--muted); }
.figure.over { color: var(--bad); }
svg { display: block; overflow: visible; }
svg text { font-size: 11px; fill: var(--on); pointer-events: none; }
svg text.small { fill: var(--muted); }
.tick { stroke: var(--muted); stroke-width: 1; }
.memory line, .limit { stroke: var(--bad); stroke-width: 2; }
.track { fill: var(--track); } .swatch.track { background: var(--track); }
.weights, .forward { fill: var(--weights); background: var(--weights); }
.gradients, .backward { fill: var(--gradients); background: var(--gradients); }
.forward.again { fill: var(--forward-again); background: var(--forward-again); }
.backward.again { fill: var(--backward-again); background: var(--backward-again); }
.optimizer { fill: var(--optimizer); background: var(--optimizer); }
.saved { fill: var(--saved); background: var(--saved); }
.rest, .receive { fill: var(--rest); background: var(--rest); }
.before { fill: var(--line); background: var(--line); }
.added { fill: var(--weights); background: var(--weights); }
.reached { fill: var(--optimizer); background: var(--optimizer); }
.time rect { stroke: var(--panel); stroke-width: 1; }
.time.dense rect { stroke: none; }
.area { fill: var(--saved); fill-opacity: .28; stroke: var(--saved); stroke-width: 1.25; }
.area path { vector-effect: non-scaling-stroke; }
.phase { stroke: var(--muted); stroke-width: 1; stroke-dasharray: 3 3; }
.summit { fill: var(--ink); }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 18px; padding: 0; margin: 10px 0 0;
  font-size: .88rem; }
.legend li { display: flex; align-items: baseline; gap: 7px; }
.swatch { width: 12px; height: 12px; border-radius: 2px; flex: none; position: relative; top: 1px; }
.swatch.budget-mark { width: 2px; margin: 0 5px; border-radius: 0; background: var(--bad); }
.swatch.budget-line { height: 2px; top: -4px; border-radius: 0; background: var(--bad); }
.swatch.area { background: var(--saved); opacity: .5; }
.meaning { margin: 10px 0 0; padding-left: 18px; color: var(--muted); font-size: .9rem; }
.meaning b { color: var(--ink); font-weight: 600; }
.plain { margin: 0; padding-left: 18px; overflow-wrap: anywhere; }
.many { columns: 26em; }
.frame { overflow: auto; max-height: 70vh; max-width: 100%; background: linear-gradient(90deg, transparent, var(--panel)
  70%) right / 40px 100% no-repeat local, linear-gradient(90deg, transparent, var(--line)) right / 14px 100% no-repeat
  scroll; }
table { border-collapse: collapse; font-size: .88rem; width: 100%; }
th, td { text-align: left; padding: 5px 12px 5px 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
thead th { white-space: normal; vertical-align: bottom; line-height: 1.25; }
.words { white-space: normal; min-width: 9em; line-height: 1.25; }
thead th { position: sticky; top: 0; background: var(--panel); color: var(--muted); font-weight: 600; }
tbody th { font-weight: 400; position: sticky; left: 0; background: var(--panel); }
.number { text-align: right; font-variant-numeric: tabular-nums; }
footer { color: var(--muted); font-size: .85rem; margin-top: 20px; }
@media (max-width: 700px) {
  main { padding: 16px 12px 32px; }
  section { padding: 14px 12px; }
  .row, .tall .row { grid-template-columns: auto 1fr; padding: 5px 0; }
  .row .label { grid-area: 1 / 1; } .row .figure { grid-area: 1 / 2; text-align: right; }
  .row .strip { grid-area: 2 / 1 / 3 / 3; }
  tbody th { white-space: normal; overflow-wrap: anywhere; min-width: 5em; max-width: 38vw; }
}
"""
