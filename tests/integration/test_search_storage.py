"""The search's storage beside others: a locked database, a dashboard, a URL that leads nowhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from wsgiref.util import setup_testing_defaults

import optuna
import optuna_dashboard  # type: ignore[import-untyped]  # it ships no types
import pytest

from runner.errors import ConfigError
from runner.search.storage import database_options
from runner.search.study import Search
from tests.search_samples import finish, open_search, result_of, search_settings

LOCK = """
import sqlite3, sys, time
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
time.sleep(10)
connection.execute("COMMIT")
"""


def test_tell_waits_for_a_lock_that_another_process_holds_for_ten_seconds(tmp_path: Path) -> None:
    search = open_search(search_settings(), tmp_path)
    proposal = search.ask()
    assert proposal is not None
    with subprocess.Popen(
        [sys.executable, "-c", LOCK, str(tmp_path / "optuna.db")], stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        search.tell(result_of(proposal))
        assert holder.wait() == 0
    assert search.counts().complete == 1


def test_storage_is_made_where_there_is_none(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'new.db'}"
    first = Search(search_settings(), url)
    asked = first.ask()
    first.close()
    assert Search(search_settings(), url).running() == (asked,)


def test_dashboard_shows_the_study(tmp_path: Path) -> None:
    settings = search_settings(trials=4)
    finish(open_search(settings, tmp_path))
    url = f"sqlite:///{tmp_path / 'optuna.db'}"
    app = optuna_dashboard.wsgi(optuna.storages.RDBStorage(url))
    studies = get(app, "/api/studies")["study_summaries"]
    assert [study["study_name"] for study in studies] == ["demo"]
    trials = get(app, f"/api/studies/{studies[0]['study_id']}?after=0")["trials"]
    assert [trial["state"] for trial in trials] == ["Complete"] * len(trials)
    assert len(trials) >= 4


def get(app: object, address: str) -> dict[str, list[dict[str, object]]]:
    """A GET request without a server; the JSON answered."""
    path, _, query = address.partition("?")
    environ: dict[str, object] = {"PATH_INFO": path, "QUERY_STRING": query}
    setup_testing_defaults(environ)
    statuses: list[str] = []

    def start_response(status: str, *_: object) -> None:
        statuses.append(status)

    body = b"".join(app(environ, start_response))  # type: ignore[operator]
    assert statuses == ["200 OK"]
    answer: dict[str, list[dict[str, object]]] = json.loads(body)
    return answer


@pytest.mark.parametrize(
    ("url", "cause"),
    [
        ("not a url", "Could not parse"),
        ("oracle9://host/db", "Can't load plugin"),
        (
            "sqlite:////no/such/folder/optuna.db",
            "unable to open database file; check that /no/such/folder/optuna.db can be written",
        ),
    ],
)
def test_storage_that_cannot_be_opened_is_a_mistake_of_the_user(url: str, cause: str) -> None:
    with pytest.raises(ConfigError, match=f"search storage cannot be opened: .*{cause}"):
        Search(search_settings(), url)


def test_file_that_is_no_database_is_a_mistake_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "optuna.db").write_bytes(os.urandom(4096))
    with pytest.raises(ConfigError, match="file is not a database"):
        open_search(search_settings(), tmp_path)


def test_only_sqlite_is_given_its_own_wait_for_locks() -> None:
    sqlite = database_options("sqlite:////tmp/optuna.db")
    postgresql = database_options("postgresql://me:secret@host/optuna")
    assert sqlite["connect_args"]["timeout"] >= 60
    assert "connect_args" not in postgresql
    assert postgresql["pool_pre_ping"] is True
