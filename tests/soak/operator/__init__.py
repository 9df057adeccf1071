"""An operator and bad luck: training jobs on one run, and what people, disks, clocks and schedulers do to it.

    python -m tests.soak --operator --minutes 10 --seed 1

Job after job, with options, ranks and nodes of its own, restores, trains, saves and ends, or is ended. What must come
back is decided by looking at the files and at what the ranks reported, without any code of the manager.

    plans.py     what a job does: its options, its ranks, its clock
    jobs.py      what its ranks run, and what they report
    running.py   the processes of a job, to be watched, stopped and killed
    clocks.py    clocks that are wrong
    field.py     the run's disks: the nodes' and the durable tier's, small file systems where they can be mounted
    harms.py     what people do to files
    look.py      what is there by the files
    oracle.py    what was saved, and what must be restorable, kept and gone
    disturbances.py   what happens while a job runs
    ends.py      how a job ended, held against what happened to it
    chaos.py     the draws and the loop
"""
