"""Find out beforehand what compression brings: measure storage and machine, predict, advise, count the cost."""
