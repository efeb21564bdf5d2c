"""Charts of a run's scalars: the layout of TensorBoard's Custom Scalars, and a page that compares runs.

charts    which scalars each chart shows
events    reads the event files of a run
scalars   reads the scalars of a run
media     reads the images and texts of a run
table     differing options and results of the runs
page      the HTML page; uPlot and page.js draw its charts
"""
