"""A run's scalars put before a person's eyes: TensorBoard's layout of them, and a page that compares runs.

charts    which scalars stand together in a chart, for both
scalars   what a run logged, read back
thinning  long curves made short for drawing
table     what differs among runs, and what came of them
page      one HTML page of charts and table, drawn by uPlot and page.js
"""
