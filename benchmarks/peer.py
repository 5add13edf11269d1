"""A program of another environment that is timed beside ours: it waits for its turn."""

import json
import subprocess
from pathlib import Path


class Peer:
    """`program` of this folder, which says in JSON what it runs (`about`), and answers each line with a line."""

    def __init__(self, python: str, program: str, *options: str):
        command = [python, str(Path(__file__).parent / program), *options]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.about = json.loads(self.process.stdout.readline())

    def ask(self, line: object) -> str:
        print(line, file=self.process.stdin, flush=True)
        return self.process.stdout.readline()

    def end(self) -> None:
        self.process.stdin.close()
        self.process.wait()
