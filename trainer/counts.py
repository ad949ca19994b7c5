"""How many episodes and groups of a run there are, by what became of them, and what they were worth."""

import json
import sqlite3
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Episodes on the surviving lineage of the run.

    >>> Counts(started=8, finished=8, trained=4, groups_failed=0, groups_dropped=0).trained
    4
    """

    started: int
    """Members of groups that were issued."""
    finished: int
    """Members whose episode ended, however it did."""
    trained: int
    """Scored members of groups that a step trained."""
    groups_failed: int
    """Groups of which no member is scored: consumed without a step."""
    groups_dropped: int
    """Groups left out for their age."""
    groups_filtered: int = 0
    """Groups left out because their advantages are all 0."""


def read_counts(db: sqlite3.Connection) -> Counts:
    """The counts of the journal that `db` is a connection to."""
    ((started, finished, trained, failed, dropped, filtered),) = db.execute(
        "SELECT COALESCE(SUM(group_size), 0), COALESCE(SUM(num_ended), 0),"
        " COALESCE(SUM(num_scored * (state = 'trained')), 0), COALESCE(SUM(state = 'failed'), 0),"
        " COALESCE(SUM(state = 'dropped'), 0), COALESCE(SUM(state = 'filtered'), 0) FROM groups"
    )
    return Counts(
        started=started,
        finished=finished,
        trained=trained,
        groups_failed=failed,
        groups_dropped=dropped,
        groups_filtered=filtered,
    )


def read_rewards_by_group(db: sqlite3.Connection) -> list[tuple[int, list[float]]]:
    """For each group with a scored member, in the order of issue: the index of its task, and their grades."""
    rows = db.execute(
        "SELECT task_index, json_group_array(reward) FROM episodes JOIN groups USING (group_id)"
        " WHERE reward IS NOT NULL GROUP BY task_index ORDER BY task_index"
    )
    return [(task_index, json.loads(rewards)) for task_index, rewards in rows]


def read_rewards(db: sqlite3.Connection) -> list[float]:
    """The grades of the scored episodes, in the order in which their tasks were taken.

    In the order in which they ended, short episodes would come first, and those are often the failed ones.
    """
    rows = db.execute(
        "SELECT reward FROM episodes JOIN groups USING (group_id) WHERE reward IS NOT NULL ORDER BY task_index, member"
    )
    return [reward for (reward,) in rows]
