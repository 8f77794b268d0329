"""The report's charts, as Vega-Lite made with altair. Each is a function of a View that returns a Chart or None.

The charts are memory.{peak, predicted, batches}, speed.{throughput, step, scaling}, tradeoffs.{trade, checkpointing},
traffic.traffic, losses.losses and growth.memory_wall. A chart is None if there is nothing to draw.

lines.py and series.py select the data as plain values, marks.py has the layers that charts share, label_placement.py
places labels, style.py has colors, sizes and the configs for light and dark pages, which are not part of a spec, and
render.py turns specs into SVG and provides Vega's library for a page.

A spec's width is fixed. A page that embeds a spec with usermeta {"fluid": true} sets its width to "container". A
spec's parameter `hidden` is a list of strategies whose marks are left out.
"""
