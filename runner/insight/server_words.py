"""What a report says of the inside of the servers: the best setting's, and what is wrong in any."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from runner.insight.ranking import Ranking, Setting
from runner.measure.evidence_words import Finding, FindingKind, evidence_words, findings

MOST_SETTINGS = 4


def server_words(ranking: Ranking) -> Iterator[str]:
    """One sentence for the best setting, one for each kind of finding; none without evidence."""
    if ranking.best is not None:
        concurrency = ranking.objectives[0].concurrency
        rungs = ranking.best.rungs_at(concurrency)
        words = evidence_words(rungs[-1]) if rungs else ""
        if words:
            number = ranking.best.number
            yield f"Inside the servers of #{number} at C={concurrency:g}: {words}."
    settings = (*ranking.settings, *_searched_only(ranking))
    found = [(setting, finding) for setting in settings for finding in _worst(setting)]
    for kind in FindingKind:
        shown = [_of_setting(setting, each) for setting, each in found if each.kind is kind]
        if shown:
            more = len(shown) - MOST_SETTINGS
            rest = [f"{more} more settings"] if more > 1 else shown[MOST_SETTINGS:]
            yield f"{kind}: {'; '.join((*shown[:MOST_SETTINGS], *rest))}."


def _searched_only(ranking: Ranking) -> Iterable[Setting]:
    """Settings that were measured at the lengths of the search and at no other."""
    if ranking.searched is None:
        return ()
    known = {setting.number for setting in ranking.settings}
    return (setting for setting in ranking.searched.settings if setting.number not in known)


def _worst(setting: Setting) -> Iterator[Finding]:
    """The worst finding of each kind over all rungs of a setting."""
    found = [finding for result in setting.measurements for finding in findings(result)]
    for kind in FindingKind:
        of_kind = [finding for finding in found if finding.kind is kind]
        if of_kind:
            yield max(of_kind, key=lambda finding: finding.weight)


def _of_setting(setting: Setting, finding: Finding) -> str:
    return f"#{setting.number} at C={finding.concurrency} {finding.words}"
