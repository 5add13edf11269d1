"""Datasets of the Hugging Face hub, read row by row: `hub:OWNER/NAME[@REVISION][#CONFIG][:SPLIT]`."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nagjax.data.storage import HUB_PREFIX
from nagjax.errors import UserError

COMMIT = re.compile("[0-9a-f]{40}")


@dataclass(frozen=True)
class HubDataset:
    """The parts of a dataset's name; str() gives the name again."""

    repository: str
    revision: str = ""  # a branch, a tag or a commit
    config: str = ""
    split: str = ""

    @classmethod
    def of(cls, name: str) -> "HubDataset":
        rest, _, split = name.removeprefix(HUB_PREFIX).partition(":")
        rest, _, config = rest.partition("#")
        repository, _, revision = rest.partition("@")
        return cls(repository, revision, config, split)

    def __str__(self) -> str:
        parts = (("@", self.revision), ("#", self.config), (":", self.split))
        return HUB_PREFIX + self.repository + "".join(mark + part for mark, part in parts if part)

    @property
    def commit(self) -> str | None:
        """The commit that the dataset is pinned to; None if the revision is not a commit."""
        return self.revision if COMMIT.fullmatch(self.revision) else None

    @property
    def unpinned(self) -> "HubDataset":
        return replace(self, revision="") if self.commit else self

    def pinned(self) -> "HubDataset":
        """The dataset pinned to its present commit; unchanged if the hub cannot be asked, in which case reading it will
        say why."""
        if self.commit:
            return self
        try:
            from huggingface_hub import HfApi

            commit = HfApi().dataset_info(self.repository, revision=self.revision or None, timeout=30).sha
        except Exception:  # the hub client raises many unrelated types: network, names, access
            return self
        return replace(self, revision=commit) if commit else self

    def rows(self) -> Iterator[Any]:
        """Streams the rows. Raises UserError if the dataset cannot be read."""
        try:
            import datasets
        except ImportError:
            raise UserError("inputs", str(self), "needs the `datasets` package: pip install -e '.[hub]'") from None
        at = {"revision": self.revision} if self.revision else {}
        try:
            yield from datasets.load_dataset(
                self.repository, self.config or None, split=self.split or "train", streaming=True, **at
            )
        except Exception as error:  # many unrelated types, as above
            fix = "check the name and the network, or download its files elsewhere and give their folder"
            raise UserError("inputs", str(self), f"{type(error).__name__}: {error}; {fix}") from error


def pinned(inputs: Sequence[str]) -> list[str]:
    """The inputs with every hub dataset pinned to one commit, so that all passes read the same rows."""
    return [str(HubDataset.of(name).pinned()) if name.startswith(HUB_PREFIX) else name for name in inputs]
