"""What a run did, as JSON lines: ``records`` (the lines), ``sink`` (the file), ``report`` (sums).

The first record of a run is its ``configuration``; after that there is one ``window`` record for
each measuring window.
"""
