"""Frameworks that save through this package: each with its real package, in a job of two ranks on CPUs.

A job (jobs/) trains, saves, goes on and is killed; it is started again, resumes and goes on to the same step. What was
saved, what was loaded and the state at the end must be the same, bit for bit.
"""
