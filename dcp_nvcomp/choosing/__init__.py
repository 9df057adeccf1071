"""Find out beforehand what compression brings: measure storage and machine, predict, advise, count the cost.

bench.py      measures: storage_rates.py the storage, codec_rates.py the machine, trials.py both together
model.py      from what was measured to the seconds of a save or load of any size
advice.py     codec, threads and interval, from a bench; intervals.py is the theory of the last
savings.py    what a month of checkpoints costs; knows nothing of this machine
"""
