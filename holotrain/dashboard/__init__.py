"""Charts of a run's scalars: the layout of TensorBoard's Custom Scalars, and a page that compares runs.

charts  which scalars each chart shows
logs    reads the scalars, images and texts of a run
curves  downsampling and smoothing of long curves
table   differing options and results of the runs
page    the HTML page; uPlot and page.js draw its charts
"""
