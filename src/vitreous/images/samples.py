"""Images with their labels and masks: one, and as many as a data set has, in columns rather than objects."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

from vitreous._support.files import sha256, stamp_file
from vitreous.images import pictures
from vitreous.images.pictures import Stored

Box = tuple[float, float, float, float]  # left, top, right, bottom
Label = int | str | None  # a class number, or a name that is yet to be found in the model
Mask = Path | Box | Stored | None
COLUMNS = ("files", "labels", "masks", "stamps", "mask_stamps")


@dataclass(frozen=True)
class Sample:
    """An image with its label and its mask, as far as they are known."""

    image: Path | Stored
    name: str
    label: Label = None
    mask: Mask = None
    seen: tuple[str, str] | None = field(default=None, repr=False, compare=False)  # stamps when a study was planned

    def open(self, channels: int = 3) -> pictures.Picture:
        return pictures.read(self.image, channels=channels)

    @property
    def stamp(self) -> str:
        """Cheap to compute; changes when the image may have changed."""
        return stamp_of(self.image)

    @property
    def stamps(self) -> tuple[str, str]:
        """Those of the image and of its mask."""
        return self.stamp, stamp_of(self.mask)

    @property
    def home(self) -> Path | None:
        """The folder or file that holds the image."""
        return self.image.home if isinstance(self.image, Stored) else self.image.parent

    @property
    def sha256(self) -> str:
        """Of the content of its file."""
        if isinstance(self.image, Path):
            return sha256(self.image)
        return hashlib.sha256(self.image.read_bytes()).hexdigest()


class Samples(Sequence[Sample]):
    """Images in a fixed order; a million take a hundred megabytes, as each is made when it is asked for.

    `root`: the folder that the names are paths in, unless `files` says where the images are.
    """

    __slots__ = ("files", "labels", "mask_stamps", "masks", "names", "root", "stamps")

    def __init__(
        self,
        names: Sequence[str],
        root: str = "",
        *,
        files: Sequence[str | Path | Stored] | None = None,
        labels: Sequence[Label] | None = None,
        masks: Sequence[Mask] | None = None,
        stamps: Sequence[str] | None = None,
        mask_stamps: Sequence[str] | None = None,
    ) -> None:
        self.names, self.root, self.files, self.labels, self.masks = names, root, files, labels, masks
        self.stamps, self.mask_stamps = stamps, mask_stamps  # when a study was planned

    @classmethod
    def of(cls, samples: Iterable[Sample]) -> Samples:
        """The same in columns."""
        if isinstance(samples, Samples):
            return samples
        listed = list(samples)
        seen = [sample.seen for sample in listed if sample.seen is not None]
        known = len(seen) == len(listed)
        return cls(
            [sample.name for sample in listed],
            files=[sample.image for sample in listed],
            labels=[sample.label for sample in listed],
            masks=[sample.mask for sample in listed],
            stamps=[image for image, _ in seen] if known else None,
            mask_stamps=[mask for _, mask in seen] if known else None,
        )

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> Samples: ...
    def __getitem__(self, index: int | slice) -> Sample | Samples:
        if isinstance(index, slice):
            parts = {name: getattr(self, name) for name in COLUMNS}
            cut = {name: part[index] for name, part in parts.items() if part is not None}
            return Samples(self.names[index], self.root, **cut)
        label = None if self.labels is None else self.labels[index]
        mask = None if self.masks is None else self.masks[index]
        where = self._place(index)
        known = None if self.stamps is None else (self.stamps[index], self._mask_stamp(index))
        return Sample(where if isinstance(where, Stored) else Path(where), self.names[index], label, mask, known)

    def __iter__(self) -> Iterator[Sample]:
        return (self[i] for i in range(len(self)))

    def __eq__(self, other: object) -> bool:
        alike = isinstance(other, Sequence) and len(other) == len(self)
        return alike and all(one == two for one, two in zip(self, other))  # type: ignore[call-overload]

    def __hash__(self) -> int:
        return hash(tuple(self.names))

    def _place(self, index: int) -> str | Path | Stored:
        return os.path.join(self.root, self.names[index]) if self.files is None else self.files[index]

    def pick(self, numbers: Iterable[int]) -> Samples:
        """Some of them, by their numbers."""
        chosen = list(numbers)
        parts = {name: getattr(self, name) for name in COLUMNS}
        cut = {name: [part[i] for i in chosen] for name, part in parts.items() if part is not None}
        return Samples([self.names[i] for i in chosen], self.root, **cut)

    def labelled(self, labels: Sequence[Label] | None) -> Samples:
        """The same images with other labels."""
        return self._with(labels=labels)

    def masked(self, masks: Sequence[Mask]) -> Samples:
        """The same images with other masks."""
        return self._with(masks=masks, mask_stamps=None)

    def named(self, names: Sequence[str]) -> Samples:
        """The same images with other names."""
        files = [self._place(i) for i in range(len(self))] if self.files is None else self.files
        return Samples(names, files=files, labels=self.labels, masks=self.masks)

    def stamped(self) -> Samples:
        """The same images, which know how they were, so that a change on the way is noticed."""
        marks = None if self.masks is None else list(map(stamp_of, self.masks))
        return self._with(stamps=[stamp_of(self._place(i)) for i in range(len(self))], mask_stamps=marks)

    def _with(self, **columns: Any) -> Samples:
        return Samples(self.names, self.root, **{name: getattr(self, name) for name in COLUMNS} | columns)

    def _mask_stamp(self, index: int) -> str:
        if self.mask_stamps is not None:
            return self.mask_stamps[index]
        return stamp_of(None if self.masks is None else self.masks[index])

    def told(self) -> Iterator[tuple[str, Label, str, str]]:
        """The name, label, and the stamps of the mask and the image of each."""
        for i, name in enumerate(self.names):
            label = None if self.labels is None else self.labels[i]
            stamp = stamp_of(self._place(i)) if self.stamps is None else self.stamps[i]
            yield name, label, self._mask_stamp(i), stamp


def stamp_of(held: str | Path | Box | Stored | None) -> str:
    if isinstance(held, str | Path):
        return stamp_file(held)
    return held.stamp if isinstance(held, Stored) else str(held)
