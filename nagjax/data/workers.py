"""The start of the processes that make batches: they leave signals to their trainer, and end when it ends."""

import multiprocessing
import os
import signal
import threading


def begin(index: int, count: int) -> None:
    """Called by grain in each worker process.

    A signal to the whole group (Ctrl-C, a scheduler, a terminal that closes) is left to the trainer, which needs
    batches until its step is done. If the trainer is killed, this process ends, too, instead of waiting for a reader
    forever.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=[multiprocessing.parent_process()], name="parent", daemon=True).start()


def _end_with(parent) -> None:
    parent.join()
    os._exit(1)
