"""What a training run needs on a named TPU slice or GPU box, found by compiling its step with no hardware.

`topology` names the chips, `worker` compiles the step in a process of its own, `hlo` and `account` read what the
compiled program computes, moves and communicates, `roofline` turns that into a lower bound of the step time.
"""
