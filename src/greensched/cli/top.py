"""`greensched top`: a screen that shows repeatedly what running pools do, from their sockets."""

from __future__ import annotations

import json
import os
import string
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.style import Style
from rich.table import Table
from rich.text import Text

from greensched.cli.terminal import print_json
from greensched.errors import InvalidRequest, SocketUnavailable
from greensched.observability import sm_map
from greensched.observability.snapshot_client import find_sockets, read_snapshot

#: The result of `Snapshot.as_dict`, and parts of it.
SnapshotDict = Mapping[str, Any]

#: Colours of classes, by 256-colour number. Each has a contrast of at least 3 to black and to
#: white, so that the screen is readable on both.
COLOURS = (33, 166, 70, 162, 97, 37, 136, 203)
#: How the SMs of a cell are drawn, and how on a terminal with ASCII only.
FILLS = {"leased": "█#", "lent": "░-", "draining": "╱/", "free": "·.", "hung": "×x"}  # noqa: RUF001  a diagonal line, not a slash
#: The width in columns from which the table of classes shows all its columns.
WIDE = 150
#: The width below which it shows its main columns alone.
NARROW = 80
MAIN = "\nSMs", "wait-\ning", "wait\np99", "use\np99", "SM\ntime"
#: The most leases and events on the screen.
MOST_LEASES, MOST_EVENTS = 5, 5
OPEN = "open"
#: A loop is slow if its tasks resume this many seconds after their grant, as in the alert
#: `GreenschedLoopSlow`.
SLOW_S = 0.05


def top(pool: str | None, *, interval: float, once: bool, as_json: bool, console: Console) -> None:
    """Show pools until interrupted, or once.

    Args:
        pool: A process id or the path of a socket. None: every pool of this user with a socket.
        interval: Seconds between two screens.
        once: Show one screen only.
        as_json: Print lists of snapshots instead, one line each.
        console: The console to print on.

    Raises:
        SocketUnavailable, InvalidRequest: There is no pool, or it has closed.
    """
    if as_json and once:
        print_json(read(pool)[0])
    elif as_json:
        while True:
            print(json.dumps(read(pool)[0]), flush=True)
            time.sleep(interval)
    elif once:
        console.print(Screen(*read(pool)))
    else:
        _go_on(pool, interval, console)


def _go_on(pool: str | None, interval: float, console: Console) -> None:
    """Draw one screen after another: in place on a terminal, otherwise below each other."""
    before: list[SnapshotDict] = []
    if not console.is_terminal:
        while True:
            snapshots, problems = read(pool)
            console.print(Screen(snapshots, problems, before), "")
            before = snapshots
            time.sleep(interval)
    snapshots, problems = read(pool)
    with Live(
        Screen(snapshots, problems), console=console, screen=True, auto_refresh=False
    ) as live:
        while True:
            time.sleep(interval)
            before, (snapshots, problems) = snapshots, read(pool)
            live.update(Screen(snapshots, problems, before), refresh=True)


def read(pool: str | None) -> tuple[list[SnapshotDict], list[str]]:
    """Return a snapshot of each pool, and a line for each pool that gave none.

    Raises:
        SocketUnavailable, InvalidRequest: No pool gave a snapshot.
    """
    if pool is not None and not pool.isdecimal():
        return [read_snapshot(Path(pool))], []
    pid = None if pool is None else int(pool)
    snapshots: list[SnapshotDict] = []
    problems: list[SocketUnavailable] = []
    for path in find_sockets(pid):
        try:
            snapshots.append(read_snapshot(path))
        except SocketUnavailable as error:
            problems.append(error)
    if snapshots:
        return snapshots, list(map(str, problems))
    if problems:
        raise problems[0]
    raise InvalidRequest(_nothing(pid))


def _nothing(pid: int | None) -> str:
    """Say why there is no pool to show."""
    remedy = "open it with Pool(socket=True)"
    if pid is None:
        return f"no pool of this user has a socket: {remedy}"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return f"there is no process {pid}"
    except PermissionError:
        return f"process {pid} is another user's"
    return f"process {pid} has no pool with a socket: {remedy}"


# -- the screen ----------------------------------------------------------------------------------


class Screen:
    """Draws pools with rich, as wide as the console.

    Args:
        snapshots: The snapshots of the pools.
        problems: A line for each pool that gave no snapshot.
        before: Earlier snapshots, since which SM-time and grants are counted.
    """

    def __init__(
        self,
        snapshots: Iterable[SnapshotDict],
        problems: Iterable[str] = (),
        before: Iterable[SnapshotDict] = (),
    ) -> None:
        self._snapshots = tuple(snapshots)
        self._problems = tuple(problems)
        self._before = tuple(before)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for number, snapshot in enumerate(self._snapshots):
            if number:
                yield Text()
            before = [earlier for earlier in self._before if _is_same(earlier, snapshot)]
            yield _Pool(snapshot, before[0] if before else None, options).drawn()
        for problem in self._problems:
            yield Text(_printable(problem), "yellow")


def _is_same(first: SnapshotDict, second: SnapshotDict) -> bool:
    """Say whether two snapshots show the same pool, by process and devices."""
    uuids = [[device["uuid"] for device in snapshot["devices"]] for snapshot in (first, second)]
    return bool(first["pid"] == second["pid"] and uuids[0] == uuids[1])


class _Pool:
    def __init__(
        self, snapshot: SnapshotDict, before: SnapshotDict | None, options: ConsoleOptions
    ) -> None:
        self._snapshot = snapshot
        self._before = before
        self._width = options.max_width
        self._is_wide = options.max_width >= WIDE
        self._fill = {name: fills[options.ascii_only] for name, fills in FILLS.items()}
        self._services = [
            service
            for service in snapshot["services"]
            if any(service[key] for key in ("name", "granted", "waiting", "refused"))
        ]
        names = [service["name"] for service in self._services]
        self._letters = _letters(names)
        self._styles = {
            name: Style.parse(f"color({COLOURS[i % len(COLOURS)]})") for i, name in enumerate(names)
        }

    def drawn(self) -> Group:
        """Return all parts of the pool's screen."""
        parts: list[Any] = [self._title()]
        if error := self._snapshot.get("opening_error"):
            parts.append(Text(f"it could not open: {_printable(error)}", "bold red"))
        if self._snapshot["devices"]:
            parts.append(self._counts())
        parts += [Text(_printable(sentence), "yellow") for sentence in self._snapshot["degraded"]]
        for device in self._snapshot["devices"]:
            parts += [Text(), *self._device(device)]
        if self._services:
            parts += [self._legend(), Text(), self._classes()]
        parts += self._waiting()
        parts += self._leases()
        parts += self._events()
        return Group(*parts)

    # -- the pool --------------------------------------------------------------------------------

    def _title(self) -> Text:
        snapshot = self._snapshot
        state = Text(snapshot["state"], "bold green" if snapshot["state"] == OPEN else "bold red")
        title = Text.assemble(("greensched", "bold"), f" process {snapshot['pid']}: ", state)
        if snapshot["driver"]:
            title.append(f", driver {snapshot['driver']}, policy {_printable(snapshot['policy'])}")
        wake = snapshot["wake_p99"]
        if wake is not None:
            slow = "bold red" if wake > SLOW_S else ""
            title.append(", ").append(f"wake p99 {_seconds(wake)}", slow)
        return title

    def _counts(self) -> Text:
        snapshot, before = self._snapshot, self._before
        rate = ""
        if before is not None and snapshot["time"] > before["time"]:
            per_s = (snapshot["granted"] - before["granted"]) / (snapshot["time"] - before["time"])
            rate = f" ({per_s:,.0f}/s)"
        full = (
            "bold red"
            if snapshot["waiting"] and snapshot["waiting"] >= snapshot["max_waiting"]
            else ""
        )
        return Text.assemble(
            (f"{snapshot['waiting']:,} of {snapshot['max_waiting']:,} waiting", full),
            f", {snapshot['granted']:,} granted{rate}, {snapshot['cancelled']:,} cancelled, ",
            f"{snapshot['expired']:,} expired, {snapshot['refused']:,} refused",
        )

    # -- devices ---------------------------------------------------------------------------------

    def _device(self, device: SnapshotDict) -> list[Text]:
        sms = dict.fromkeys(("free", "leased", "draining"), 0)
        for cell in device["cells"]:
            sms[cell["state"]] = sms.get(cell["state"], 0) + cell["sms"]
        counts = ", ".join(f"{count} {state}" for state, count in sms.items())
        title = Text.assemble(
            (f"device {device['device']}", "bold"), f" {_printable(device['name'])}, ",
            f"{device['sms']} SMs: {counts}",
        )  # fmt: skip
        if self._is_wide:
            title.append(f"  {device['uuid']}", "dim")
        wrong = [device["failure"], *device["hung"]]
        failed = [Text(_printable(sentence), "bold red") for sentence in wrong if sentence]
        return [title, *failed, *self._strip(device["cells"])]

    def _strip(self, cells: list[SnapshotDict]) -> list[Text]:
        """Return lines of cells: a letter where a lease begins, then the state of its SMs."""
        width = max(2, min(8, self._width // max(1, len(cells))))
        lines, of_line = [], self._width // width
        for start in range(0, len(cells), of_line):
            line = Text(no_wrap=True, end="\n")
            last: object = None
            for cell in cells[start : start + of_line]:
                name, fill, style = self._cell(cell)
                begins = (cell["leases"], name) != last
                last = cell["leases"], name
                mark = self._letters.get(name, fill) if begins else fill
                if cell["state"] == "free":
                    mark = mark.lower()
                line.append(mark + fill * (width - 1), style)
            lines.append(line)
        return lines

    def _cell(self, cell: SnapshotDict) -> tuple[str, str, Style]:
        """Return the class that gives a cell its letter and colour, its fill, and its style."""
        owner = cell["owner"]
        if cell["state"] == "free":
            return owner, self._fill["free"], self._styles.get(owner, Style()) + Style(dim=True)
        name = next(iter(cell["services"]), "")
        style = self._styles.get(name, Style())
        if len(cell["services"]) > 1:
            style += Style(bold=True)
        if cell["state"] == "hung":
            return name, self._fill["hung"], Style.parse("bold red")
        if cell["state"] == "draining":
            return name, self._fill["draining"], style
        if owner and owner != name:
            return name, self._fill["lent"], style
        return name, self._fill["leased"], style

    def _legend(self) -> Text:
        cells = [cell for device in self._snapshot["devices"] for cell in device["cells"]]
        hung = ["hung"] if any(cell["state"] == "hung" for cell in cells) else []
        names = ("leased", "lent", "draining", *hung, "free")
        parts = [f"{self._fill[name]} {name}" for name in names]
        return Text("  ".join([*parts, "small letter: free, kept for its class"]), "dim")

    # -- classes ---------------------------------------------------------------------------------

    def _label(self, name: str) -> Text:
        shown = _printable(name) or "no class"
        letter, style = self._letters.get(name, "*"), self._styles.get(name, Style())
        return Text(f"{letter} {shown}", style)  # a class may be removed while it holds leases

    def _classes(self) -> Table:
        padding = (0, 2 if self._is_wide else 1, 0, 0)
        table = Table(box=None, pad_edge=False, header_style="bold", padding=padding)
        most = 24 if self._is_wide else 16 if self._width >= NARROW else 8
        table.add_column("\nclass", overflow="ellipsis", no_wrap=True, max_width=most)
        columns: list[tuple[str, Callable[[SnapshotDict], object]]] = [
            ("\nreserve", lambda service: service["reserve"]),
            ("\nSMs", lambda service: service["sms"]),
            ("drain-\ning", lambda service: service["sms_draining"]),
            ("\nlent", lambda service: service["sms_lent"]),
            ("wait-\ning", lambda service: service["waiting"]),
            ("wait\np50", lambda service: _seconds(service["wait_p50"])),
            ("wait\np99", lambda service: _seconds(service["wait_p99"])),
            ("use\np50", lambda service: _seconds(service["use_p50"])),
            ("use\np99", lambda service: _seconds(service["use_p99"])),
            ("SM\ntime", self._sm_time),
            ("\ndue", lambda service: _part(service["share"])),
        ]
        if self._width < NARROW:
            columns = [column for column in columns if column[0] in MAIN]
        if self._is_wide:
            columns += [
                ("drain\np99", lambda service: _seconds(service["drain_p99"])),
                ("\nborrowed", lambda service: service["sms_borrowed"]),
                ("\ncap", lambda service: "-" if service["cap"] is None else service["cap"]),
                ("\ngranted", lambda service: f"{service['granted']:,}"),
                ("\ncancelled", lambda service: f"{service['cancelled']:,}"),
                ("\nexpired", lambda service: f"{service['expired']:,}"),
                ("\nrefused", lambda service: f"{service['refused']:,}"),
            ]
        for name, _ in columns:
            table.add_column(name, justify="right", no_wrap=True)
        for service in self._services:
            cells = [str(value(service)) for _, value in columns]
            table.add_row(self._label(service["name"]), *cells)
        return table

    def _sm_time(self, service: SnapshotDict) -> str:
        """Return its fraction of SM-time, since the earlier snapshot if any SM-time passed."""
        if self._before is not None and service["sm_seconds"] is not None:
            earlier = {
                service["name"]: service["sm_seconds"] or 0.0
                for service in self._before["services"]
            }
            used = {
                service["name"]: (service["sm_seconds"] or 0.0) - earlier.get(service["name"], 0.0)
                for service in self._snapshot["services"]
            }
            if sum(used.values()) > 0:
                return _part(used[service["name"]] / sum(used.values()))
        return _part(service["sm_time"])

    # -- what waits, what is held, what happened -------------------------------------------------

    def _rows(self, title: str, rows: list[tuple[Any, ...]]) -> list[Any]:
        """Return a titled table whose last column takes the remaining width."""
        if not rows:
            return []
        table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 1))
        for number in range(len(rows[0])):
            is_last = number == len(rows[0]) - 1
            table.add_column(no_wrap=not is_last, overflow="fold" if is_last else "ellipsis")
        for row in rows:
            table.add_row(*row)
        return [Text(), Text(title, "bold"), table]

    def _waiting(self) -> list[Any]:
        firsts = [
            (service["name"], service["first"]) for service in self._services if service["first"]
        ]
        rows = [
            (
                self._label(name),
                Text(_printable(first["holder"])[:24]),
                Text(_seconds(first["waited"])),
                Text(_printable(first["text"])),
            )
            for name, first in firsts
        ]
        return self._rows("waiting: the first request of each class", rows)

    def _leases(self) -> list[Any]:
        now, several = self._snapshot["time"], len(self._snapshot["devices"]) > 1
        leases = [lease for device in self._snapshot["devices"] for lease in device["leases"]]
        leases.sort(key=lambda lease: lease["since"])
        rows = []
        for lease in leases[:MOST_LEASES]:
            where = f"device {lease['device']}, " if several else ""
            since, place = lease["draining_since"], lease["place"].rpartition("/")[2]
            state = "" if since is None else f"draining {_seconds(now - since)} "
            rows.append(
                (
                    self._label(lease["service"]),
                    Text(_printable(lease["holder"])[:24]),
                    Text(_seconds(now - lease["since"])),
                    Text(f"{lease['sms']} SMs, {where}{_cells(lease)}"),
                    Text(f"{state}{_printable(place)}"),
                )
            )
        more = len(leases) - len(rows)
        return self._rows("the oldest leases" + (f", of {len(leases)}" if more else ""), rows)

    def _events(self) -> list[Any]:
        now, times = self._snapshot["time"], dict[str, list[float]]()
        for event in reversed(self._snapshot["events"]):
            times.setdefault(event["text"], []).append(event["time"])
        rows = []
        for text, at in list(times.items())[:MOST_EVENTS]:
            often = f" ({len(at)} times)" if len(at) > 1 else ""
            when = Text(f"{_seconds(now - at[0])} ago", justify="right")
            rows.append((when, Text(f"{_printable(text)}{often}")))
        return self._rows("the last events", rows)


def _letters(names: Iterable[str]) -> dict[str, str]:
    """Return a capital letter for each class: its own initial, or another free letter."""
    letters: dict[str, str] = {}
    for name in names:
        wanted = [letter for letter in name.upper() if letter in string.ascii_uppercase]
        left = [
            letter
            for letter in (*wanted, *string.ascii_uppercase)
            if letter not in letters.values()
        ]
        letters[name] = left[0] if name and left else "*"
    return letters


def _cells(lease: SnapshotDict) -> str:
    """Return the numbers of a lease's cells as ranges."""
    numbers = sm_map.numbers(lease["cells"])
    return f"cell{'s' * (len(numbers) != 1)} {sm_map.ranges(numbers)}"


def _printable(text: str) -> str:
    """Return text without terminal control characters, which a name may contain."""
    return "".join(char if char.isprintable() else "?" for char in text)


def _seconds(seconds: float | None) -> str:
    """Format a time with two digits, in a suitable unit."""
    if seconds is None:
        return "-"
    if seconds >= 99.5:
        return f"{seconds / 60:.0f}min" if seconds < 5970 else f"{seconds / 3600:.0f}h"
    for scale, unit in ((1, "s"), (1e3, "ms")):
        if seconds * scale >= 0.995:
            return _two_digits(seconds * scale) + unit
    return _two_digits(seconds * 1e6) + "us"


def _two_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 9.95 else f"{value:.1f}".removesuffix(".0")


def _part(part: float | None) -> str:
    return "-" if part is None else f"{100 * part:.0f}%"
