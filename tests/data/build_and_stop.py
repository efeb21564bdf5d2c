"""Builds the cache of the files in a folder; with ``stop``, prints a line and hangs in the middle of tokenization.

Usage: python build_and_stop.py FOLDER CACHE {go,stop}
"""

import sys
import time

from holotrain.data import TextFiles
from holotrain.data.text import tokenise


def stand_still(flush):
    def flushed(writer):
        flush(writer)
        writer._file.flush()
        print("written", flush=True)
        time.sleep(600)

    return flushed


folder, cache, how = sys.argv[1:]
if how == "stop":
    tokenise.BATCH = 1000
    tokenise.Writer.flush = stand_still(tokenise.Writer.flush)
data = TextFiles(f"{folder}/*.txt", cache_dir=cache, unit="line")
data.prepare_data()
print(data._folder, flush=True)
