"""What a training run needs on a named TPU slice or GPU machine, found by compiling its step without the hardware.

`topology` names the chips, `worker` compiles the step in a process of its own, `account` reads what the compiled
program computes, moves and communicates, and `roofline` turns that into a lower bound of the step time.
"""
