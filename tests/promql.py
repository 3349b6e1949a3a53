"""Finds the metrics and labels that a PromQL expression names."""

import re

_NAME = re.compile(r"\blisa_[a-z0-9_]+|\bup\b(?=[{ ])")
_MATCHERS = re.compile(r"\{([^{}]*)\}")
_LISTS = re.compile(r"\b(?:by|on|ignoring|without|group_left|group_right)\s*\(([^()]*)\)")
_QUOTED = re.compile(r'"[^"]*"')
_SUFFIX = re.compile(r"_(bucket|sum|count)$")


def metrics_in(expression: str) -> set[str]:
    """Names of metrics, including the series of histograms."""
    return set(_NAME.findall(_QUOTED.sub("", expression)))


def labels_in(expression: str) -> set[str]:
    """Labels in matchers and in lists such as `by (...)`."""
    bare = _QUOTED.sub("", expression)
    found = set()
    for matchers in _MATCHERS.findall(bare):
        found |= set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))
    for listed in _LISTS.findall(bare):
        found |= {label.strip() for label in listed.split(",") if label.strip()}
    return found


def family_of(name: str, histograms: set[str]) -> str:
    """The family that a series belongs to."""
    stem = _SUFFIX.sub("", name)
    return stem if stem in histograms else name
