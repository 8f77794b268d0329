"""The report's pictures, as Vega-Lite made with altair: each is a function (View) -> Picture | None.

memory.peak, memory.predicted, memory.batches; speed.throughput, speed.step, speed.scaling; tradeoffs.trade,
tradeoffs.checkpointing; training.traffic, training.losses; growth.wall. None is for data that have nothing to draw.

lines.py, series.py, placing.py: what is drawn, as plain values. marks.py: what charts share. style.py: colours, sizes
and the configs for light and dark, of which a spec holds nothing. drawing.py: specs as SVG, Vega's library for a page.

A spec's width is fixed; who embeds one with usermeta {"fluid": true} sets its width to "container". Its parameter
`hidden` is a list of strategies whose marks are left out.
"""
