"""A program in another environment that is timed alongside nagjax: it computes only when asked."""

import json
import subprocess
from pathlib import Path


class Peer:
    """Runs `program` of this folder, which reports its versions as JSON (`about`) and answers each input line with a
    line."""

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
