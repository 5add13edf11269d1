"""What the processes that make batches do first: they end with their trainer, and with nothing else."""

import multiprocessing
import os
import signal
import threading


def begin(index: int, count: int) -> None:
    """Called by grain in each of them.

    A signal to the whole group (Ctrl-C, a scheduler, a terminal that closes) is the trainer's to answer, who needs
    batches until the step is done. If the trainer is killed this process ends, too, instead of waiting for a reader.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=[multiprocessing.parent_process()], name="parent", daemon=True).start()


def _end_with(parent) -> None:
    parent.join()
    os._exit(1)
