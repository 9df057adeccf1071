"""Find out beforehand what compression brings: measure storage and machine, predict, advise, count the cost.

bench.py      what `bench` returns; measuring.py measures storage, codecs, and whole saves and loads
model.py      from what was measured to the seconds of a save or load of any size
advice.py     codec, threads and interval, from a bench
savings.py    what a month of checkpoints costs; knows nothing of this machine
"""
