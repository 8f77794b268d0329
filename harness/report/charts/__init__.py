"""The report's charts, as Vega-Lite. Each is a function of a View that returns a Chart, or None.

A chart selects its rows and declares their fields. rows.py has these and what is made of them: the data of marks,
tooltips, the table of exact values and the range in the alternative text. marks.py has axes and layers of marks, and
the chart. Three kinds are in bars.py and curves.py. The charts are memory.{peak, batches, memory_wall, largest_model},
speed.{throughput, scaling, step, exposed_communication}, expected.{predicted, traffic, measured_against_papers,
losses}, tradeoffs.{trade, checkpointing, first_picture}; plan_page.py has that of a plan.

lines.py and curves.py select the data as plain values, style.py and theme.json have what is no part of a spec, and
render.py turns specs into files and provides Vega's library for a page.

A spec's width is fixed; a page or a paper may give it another. A spec's parameter `hidden` is a list of strategies
whose marks are left out.
"""
