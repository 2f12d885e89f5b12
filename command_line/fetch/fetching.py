"""Fetches a model from a source to a place, or finds that it is there already."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any, Final, Protocol, TypeVar

from command_line.fetch import choice
from command_line.fetch.options import FetchOptions
from command_line.fetch.place import Place
from command_line.fetch.record import Record, RecordedFile
from command_line.fetch.sources import Listing, Source, SourceFile
from command_line.fetch.transfer import Stopped, Transfer, Watcher, sha256_of, with_retries
from outrider.engine.loading.checkpoint_files import check_checkpoint, weight_map
from outrider.errors import ConfigurationError, Unavailable
from outrider.model_files import file_beside, read_json

FETCHED: Final = "fetched"
PRESENT: Final = "present"
_DAMAGED_SHOWN: Final = 3
T = TypeVar("T")


class Display(Watcher, Protocol):
    """Shows how far a fetch is."""

    def begin(self, num_files: int, num_bytes: int) -> None:
        """So many files and bytes are to be there at the end."""
        ...

    def finished(self, path: str) -> None:
        """One more file is whole."""
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a fetch."""

    state: str  # FETCHED or PRESENT
    record: Record
    num_bytes_read: int
    duration_s: float

    def document(self, folder: Path) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "state": self.state,
            "folder": str(folder),
            "num_bytes_read": self.num_bytes_read,
            "duration_s": round(self.duration_s, 3),
            **self.record.document(),
        }


class Fetch:
    """One fetch. All calls raise ConfigurationError, Unavailable, OSError and Stopped."""

    def __init__(self, source: Source, place: Place, options: FetchOptions, display: Display, stop: Event) -> None:
        self._source = source
        self._place = place
        self._options = options
        self._display = display
        self._stop = stop
        self._began_s = time.monotonic()
        self._transfers: list[Transfer] = []
        self._found: dict[Record, list[str]] = {}  # damages by record: checksums take minutes

    def run(self) -> Outcome:
        """Fetches what is not there yet."""
        record, listing = self._place.record(), None
        if record is not None and record.name == self._source.name and self._is_whole(record):
            if record.revision == self._source.commit is not None:
                return self._present(record)  # nothing can have changed, so nobody need be asked
            listing = self._list_if_reachable()
            if listing is None or self._is_current(record, listing):
                return self._present(record)
        with self._place.locked(self._options.max_wait_s, self._display, self._stop):
            listing = listing or self._list()
            record = self._place.record()  # another process may have fetched it meanwhile
            if record is not None:
                if self._is_current(record, listing):
                    return self._outcome(PRESENT, record)
                self._permit_replacing(record, listing)
            return self._outcome(FETCHED, self._fetch(listing))

    def _is_current(self, record: Record, listing: Listing) -> bool:
        """Whether the folder is whole and has what the source has now, or is left as it is."""
        if record.name != self._source.name or not self._is_whole(record):
            return False
        if record.revision == listing.revision is not None or _holds_the_same(record, listing):
            return True
        if self._options.replace or self._source.commit is not None:
            return False
        now = f"it is at {listing.revision} now" if listing.revision else "it has other files now"
        self._display.note(
            f"{self._source.address} has changed: {now}, and {self._place.folder} has what was fetched at "
            f"{record.fetched_at}{f' ({record.revision})' if record.revision else ''}. It is left as it is; --replace "
            "fetches the new version"
        )
        return True

    def _permit_replacing(self, record: Record, listing: Listing) -> None:
        if self._options.replace:
            return
        damaged = self._damaged(record)
        if damaged:
            named = ", ".join(damaged[:_DAMAGED_SHOWN])
            raise ConfigurationError(
                f"{self._place.folder} is damaged: {named}. --replace fetches it anew, and replaces it once that is "
                "whole"
            )
        version = f" at {record.revision}" if record.revision else ""
        raise ConfigurationError(
            f"{self._place.folder} has {record.source}{version}, and not {self._source.address}"
            f"{f' at {listing.revision}' if listing.revision else ''}. Name another folder for each version, or "
            "replace it with --replace; workers that have loaded it are not affected"
        )

    def _present(self, record: Record) -> Outcome:
        self._place.tidy()
        return self._outcome(PRESENT, record)

    def _list_if_reachable(self) -> Listing | None:
        """The files of the source; None where it cannot be asked, which must not keep a pod from starting: the network
        is down, the token has expired."""
        try:
            return self._source.list_files()
        except (Unavailable, ConfigurationError) as error:
            self._display.note(f"{error.message}; {self._place.folder} is used as it was fetched")
            return None

    def _list(self) -> Listing:
        return with_retries(self._source.list_files, self._display, self._stop)

    def _fetch(self, listing: Listing) -> Record:
        """Fetches the files that are needed, and renames the folder that has them."""
        address = self._source.address
        choice.refuse_unservable(listing, address)
        if listing.revision and listing.revision != self._source.commit:
            self._display.note(f"{address} is commit {listing.revision}")
        small = choice.descriptions(listing)
        guessed = [file for file in listing.files if file.path.endswith(".safetensors")]
        done = self._place.prepare([*small, *guessed])
        self._place.check_space(small)
        transfer = Transfer(self._source, listing, self._place.partial, self._display, self._stop)
        self._transfers.append(transfer)
        self._transfer(transfer, small, done)
        weights = choice.weights(listing, self._weight_names(listing), address)
        chosen = [*small, *weights]
        done = self._place.prepare(chosen)
        self._place.check_space(weights)
        self._display.begin(len(chosen), sum(file.size for file in chosen))
        for file in chosen:
            if file.path in done:
                self._display.advance(file.size)
                self._display.finished(file.path)
        self._transfer(transfer, weights, done)
        check_checkpoint(self._place.partial)
        if self._stop.is_set():
            raise Stopped
        record = Record.made_now(address, self._source.name, listing.revision, list(done.values()))
        self._place.publish(record)
        return record

    def _transfer(self, transfer: Transfer, files: list[SourceFile], done: dict[str, RecordedFile]) -> None:
        """Transfers those that are not done, several at once."""

        def fetch(file: SourceFile) -> RecordedFile:
            found = transfer.fetch(file)
            self._display.finished(file.path)
            return found

        def finish(found: RecordedFile) -> None:
            self._place.finish(found)
            done[found.path] = found

        self._at_once(fetch, [file for file in files if file.path not in done], finish)

    def _weight_names(self, listing: Listing) -> list[str]:
        """The names of the files of weights, as the fetched descriptions have them."""
        path = self._place.partial / choice.CONFIG
        index = file_beside(path, read_json(path).get("transformers_weights") or choice.usual_weights(listing))
        if index.suffix != ".json":
            return [index.name]
        if not index.is_file():
            raise ConfigurationError(
                f"{self._source.address} has no {index.name}, and no model.safetensors: nothing says which files are "
                "its weights"
            )
        return sorted(set(weight_map(index).values()))

    def _is_whole(self, record: Record) -> bool:
        return not self._damaged(record)

    def _damaged(self, record: Record) -> list[str]:
        """Files of the folder that are not as recorded, each with the reason."""
        if record not in self._found:
            self._found[record] = self._compared(record)
        return self._found[record]

    def _compared(self, record: Record) -> list[str]:
        sizes = {file.path: _size_of(self._place.folder / file.path) for file in record.files}
        found = [
            f"{file.path} {'is missing' if size is None else f'has {size} of {file.size} bytes'}"
            for file in record.files
            if (size := sizes[file.path]) != file.size
        ]
        if found or not self._options.verify:
            return found
        wrong: list[str] = []

        def compare(file: RecordedFile) -> str | None:
            return None if sha256_of(self._place.folder / file.path, self._stop) == file.sha256 else file.path

        self._at_once(compare, record.files, lambda path: wrong.append(f"{path} has another sha256") if path else None)
        return sorted(wrong)

    def _at_once(self, call: Callable[[Any], T], items: Iterable[Any], finish: Callable[[T], None]) -> None:
        """Calls for all items, several at once. The first error stops the others, and is raised."""

        def guarded(item: Any) -> T:
            try:
                if self._stop.is_set():
                    raise Stopped
                return call(item)
            except BaseException:
                self._stop.set()
                raise

        with ThreadPoolExecutor(self._options.at_once, "fetch") as pool:
            futures = [pool.submit(guarded, item) for item in items]
            try:
                for future in as_completed(futures):
                    if future.exception() is None:
                        finish(future.result())
            except BaseException:  # a signal
                self._stop.set()
                raise
        errors = [error for future in futures if (error := future.exception())]
        for error in sorted(errors, key=lambda error: isinstance(error, Stopped)):
            raise error

    def _outcome(self, state: str, record: Record) -> Outcome:
        num_bytes = sum(transfer.num_bytes_read for transfer in self._transfers)
        return Outcome(state, record, num_bytes, time.monotonic() - self._began_s)


def _holds_the_same(record: Record, listing: Listing) -> bool:
    """Whether a source still has the very files that a folder was fetched from: a new commit often changes others."""
    offered = {file.path: file.identity for file in listing.files}
    recorded = {file.path for file in record.files}
    return all(offered.get(file.path) == file.identity for file in record.files) and all(
        file.path in recorded for file in choice.descriptions(listing)
    )


def _size_of(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
