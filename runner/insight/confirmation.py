"""What the user's own lengths changed: the search's leader, and the one that was confirmed.

A study whose search has shorter replies than its workload has two rankings, one for each law.
Their values are never mixed; this is where the two are put side by side.
"""

from __future__ import annotations

from runner.insight.ranking import Ranking, Setting
from runner.insight.words import format_number, format_value
from runner.lengths import law_words
from runner.settings import StudySettings
from runner.trial import TrialLengths


def lengths_words(lengths: TrialLengths, settings: StudySettings) -> str:
    """`at your lengths`, `at 256 tokens`; empty where the study has one law for all trials."""
    law = settings.search.output_tokens
    if law is None:
        return ""
    return f"at {law_words(law)}" if lengths is TrialLengths.SEARCH else "at your lengths"


def lengths_title(lengths: TrialLengths, settings: StudySettings) -> str:
    """The title of a table: `At your lengths (1,300 - 3,000 tokens)`; empty where one law is."""
    law = settings.search.output_tokens
    if law is None:
        return ""
    if lengths is TrialLengths.SEARCH:
        return f"At the lengths of the search ({law_words(law)})"
    return f"At your lengths ({law_words(settings.workload.output_tokens)})"


def confirmation_words(ranking: Ranking, settings: StudySettings) -> str | None:
    """Whether the leader changed at the user's lengths, with both values; None: one law."""
    law, own = settings.search.output_tokens, law_words(settings.workload.output_tokens)
    best = ranking.best
    if law is None or best is None:
        return None
    if ranking.searched is None:
        why = "" if settings.measure.finalists else ": measure.finalists is 0"
        return f"No setting was measured at your lengths ({own}){why}; {law_words(law)} stand here."
    before = ranking.searched.best
    if before is None:
        return None
    here = f"At your lengths ({own})"
    if before.number == best.number:
        now, then = (format_value(s.values[0], ranking.objectives[0]) for s in (best, before))
        return f"{here} #{best.number} leads as it did at {law_words(law)}: {now}, there {then}."
    return (
        f"{here} the order changed: {_lead_words(ranking, 'leads', best, before)}; "
        f"at {law_words(law)} {_lead_words(ranking.searched, 'led', before, best)}."
    )


def _lead_words(ranking: Ranking, verb: str, leader: Setting, other: Setting) -> str:
    """`#7 leads with 512 tokens/s at C=64 (#3: 498)`."""
    value = format_value(leader.values[0], ranking.objectives[0])
    rival = ranking.find(other.number)
    if rival is None:
        return f"#{leader.number} {verb} with {value} (#{other.number} has no value there)"
    doubt = ", within the noise" if ranking.is_noise(leader, rival) else ""
    shown = format_number(rival.values[0])
    return f"#{leader.number} {verb} with {value} (#{other.number}: {shown}{doubt})"


def lengths_document(ranking: Ranking, settings: StudySettings) -> dict[str, object] | None:
    """Both orders with their values, best first; None where the study has one law for all."""
    law = settings.search.output_tokens
    if law is None:
        return None
    at_search, at_own = (ranking.searched or ranking), (ranking if ranking.searched else None)
    own = law_words(settings.workload.output_tokens)
    changed = None
    if at_own is not None and at_own.best is not None and at_search.best is not None:
        changed = at_own.best.number != at_search.best.number
    return {
        "search": {"output_tokens": law_words(law), "order": _order_document(at_search)},
        "workload": {"output_tokens": own, "order": _order_document(at_own)},
        "leader_changed": changed,
    }


def _order_document(ranking: Ranking | None) -> list[dict[str, object]]:
    settings = () if ranking is None else ranking.settings
    return [{"number": each.number, "values": list(each.values)} for each in settings]
