"""Finds what in a grammar derives no finite text. llguidance takes it; an answer could never end.

The grammar is one that llguidance has compiled, so its syntax is right. What is not understood here
counts as finite.
"""

import json
import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urljoin

_LITERAL = r'"(?:\\.|[^"\\])*"'
_PARAMETER = r"\w+(?:\((?:[^()]|\([^()]*\))*\))?"
_TOKEN = re.compile(
    rf"""
      (?P<no_item> (?://|\#)[^\n]* | ->\s*\w+ | (?:::|%if)\s*{_PARAMETER} )
    | ^[ \t]*[?!]*(?P<rule>[A-Za-z_]\w*)(?:::\w+)?\s*(?:\[(?:{_LITERAL}|[^]"])*\])?\s*:(?!:)
    | ^[ \t]*%\w+[^\n]*
    | (?P<terminal> {_LITERAL}i? | /(?:\\.|[^/\\])+/[imslux]* | <[^>\n]*> )
    | %(?P<json>json|regex)\s*
    | (?P<name>[A-Za-z_]\w*)
    | (?P<optional> [?*] | \{{\s*0*\s*,\s*\d*\s*\}} | ~\s*0+(?!\d) )
    | \{{[\d,\s]*\}}
    | (?P<nested>%lark)\s*\{{
    | (?P<mark>[|()\[\]}}])
    | .
    """,
    re.VERBOSE | re.MULTILINE | re.DOTALL,
)


@dataclass(eq=False)
class _Rule:
    """What has alternatives: for each of them, the rules that it cannot do without."""

    label: str = ""  # of what a client can find in the grammar: the others are parts of it
    alternatives: list[list["_Rule"]] = field(default_factory=lambda: [[]])
    optional: list["_Rule"] = field(default_factory=list)  # the alternatives may do without them

    def skip_last(self) -> None:
        if self.alternatives[-1]:
            self.optional.append(self.alternatives[-1].pop())


_FINITE = _Rule()


def unending_part(lark: str) -> str | None:
    """A part, reachable from the start, that derives no finite text; None if there is none."""
    reached = _reached(_rules_of_lark(lark)["start"])
    ending: set[_Rule] = set()
    waiting: defaultdict[_Rule, list[tuple[_Rule, set[_Rule]]]] = defaultdict(list)
    found: list[_Rule] = []
    for rule in reached:
        for needs in rule.alternatives:
            unmet = set(needs)
            for need in unmet:
                waiting[need].append((rule, unmet))
            if not unmet:
                found.append(rule)
    while found:
        rule = found.pop()
        ending.add(rule)
        for user, unmet in waiting.pop(rule, ()):
            unmet.remove(rule)
            if not unmet:
                found.append(user)
    rest = next((rule for rule in reached if rule not in ending), None)
    return None if rest is None else f"{_label_in_circle(rest, ending)} derives no finite text"


def _reached(start: _Rule) -> dict[_Rule, None]:
    reached = {start: None}
    places = [start]
    while places:
        rule = places.pop()
        for after in [*rule.optional, *(need for needs in rule.alternatives for need in needs)]:
            if after not in reached:
                reached[after] = None
                places.append(after)
    return reached


def _label_in_circle(rule: _Rule, ending: set[_Rule]) -> str:
    """The label of a rule that needs itself and that this rule needs."""
    path: dict[_Rule, None] = {}
    while rule not in path:
        path[rule] = None
        rule = next(need for need in rule.alternatives[0] if need not in ending)
    circle = list(path)
    return next(each.label for each in circle[circle.index(rule) :] if each.label)


def _rules_of_lark(lark: str) -> defaultdict[str, _Rule]:
    rules: defaultdict[str, _Rule] = defaultdict(_Rule)
    open_rules = [_Rule()]  # the rule, and the groups in it that are open
    around: list[tuple[defaultdict[str, _Rule], list[_Rule]]] = []  # a nested grammar
    position = 0
    while position < len(lark):
        token = _TOKEN.match(lark, position)
        assert token is not None
        position = token.end()
        item = None
        match token.lastgroup, token[token.lastgroup or 0]:
            case "rule", name:
                open_rules = [rules[name]]
                open_rules[0].label = f"the rule {name!r}"
            case "terminal", _:
                item = _FINITE
            case "json", kind:
                value, position = json.JSONDecoder().raw_decode(lark, position)
                item = _Schemas(value).rule if kind == "json" else _FINITE
            case "nested", _:
                around.append((rules, open_rules))
                rules = defaultdict(_Rule)
                open_rules[-1].alternatives[-1].append(rules["start"])
            case "mark", "}" if around:
                rules, open_rules = around.pop()
            case "name", name:
                item = rules[name]
            case "optional", _:
                open_rules[-1].skip_last()
            case "mark", "|":
                open_rules[-1].alternatives.append([])
            case "mark", "(" | "[":
                open_rules.append(_Rule())
                open_rules[-2].alternatives[-1].append(open_rules[-1])
            case "mark", closing if len(open_rules) > 1:
                del open_rules[-1]
                if closing == "]":
                    open_rules[-1].skip_last()
        if item is not None:
            open_rules[-1].alternatives[-1].append(item)
    return rules


class _Schemas:
    """A JSON schema as a rule: a schema needs all that it is combined of, and required values."""

    def __init__(self, root: object) -> None:
        self._named: dict[str, object] = {"json-schema:///": root}  # by absolute URI
        self._bases: dict[int, str] = {}  # by id
        self._name_all(root)
        self._rules: dict[int | str, _Rule] = {}
        self._unread: list[dict[str, Any]] = []
        self.rule = self._rule_of(root)
        while self._unread:
            self._read(self._unread.pop())

    def _name_all(self, root: object) -> None:
        places = [(root, "json-schema:///")]
        while places:
            place, base = places.pop()
            if isinstance(place, dict):
                if isinstance(name := place.get("$id"), str):  # "#name" is an anchor, up to draft 7
                    uri = _absolute(base, name)
                    self._named[uri.removesuffix("#")] = place
                    base = uri.partition("#")[0]
                if isinstance(anchor := place.get("$anchor"), str):
                    self._named[f"{base}#{anchor}"] = place
                self._bases[id(place)] = base
                places += [(each, base) for key, each in place.items() if key not in _NO_SCHEMAS]
            elif isinstance(place, list):
                places += [(each, base) for each in place]

    def _target(self, uri: str) -> object:
        """True, as the schema of anything, where nothing is found."""
        start, _, fragment = uri.partition("#")
        fragment = unquote(fragment)
        if not fragment.startswith("/"):
            return self._named.get(f"{start}#{fragment}".removesuffix("#"), True)
        place: Any = self._named.get(start)
        for part in fragment.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(place, dict) and key in place:
                place = place[key]
            elif isinstance(place, list) and key.isdecimal() and len(key) < 9:
                place = place[int(key)] if int(key) < len(place) else True
            else:
                return True
        return place

    def _rule_of(self, schema: object) -> _Rule:
        if not isinstance(schema, dict):
            return _FINITE
        if id(schema) not in self._rules:
            self._rules[id(schema)] = _Rule()
            self._unread.append(schema)
        return self._rules[id(schema)]

    def _rule_of_reference(self, base: str, reference: str) -> _Rule:
        uri = _absolute(base, reference)
        if uri not in self._rules:
            rule = self._rules[uri] = _Rule(f"the reference {reference!r}")
            rule.alternatives = [[self._rule_of(self._target(uri))]]
        return self._rules[uri]

    def _read(self, schema: dict[str, Any]) -> None:
        rule = self._rules[id(schema)]
        needs = rule.alternatives[0]
        if isinstance(reference := schema.get("$ref"), str):
            needs.append(self._rule_of_reference(self._bases[id(schema)], reference))
        needs += map(self._rule_of, _list(schema, "allOf"))
        for key in ("anyOf", "oneOf"):
            if branches := [each for each in _list(schema, key) if each is not False]:
                needs.append(_Rule("", [[self._rule_of(each)] for each in branches]))
        properties, patterns = _dict(schema, "properties"), _dict(schema, "patternProperties")
        additional = schema.get("additionalProperties")
        if schema.get("type") in ("object", ["object"]):
            unnamed = None if patterns else additional
            required = _list(schema, "required")
            needs += [self._rule_of(properties.get(name, unnamed)) for name in required]
        first, more = _list(schema, "prefixItems"), schema.get("items")
        if isinstance(more, list):  # up to draft 2019-09
            first, more = more, schema.get("additionalItems")
        if schema.get("type") in ("array", ["array"]):
            num_items = int(schema.get("minItems", 0))
            needs += map(self._rule_of, first[:num_items])
            if num_items > len(first):
                needs.append(self._rule_of(more))
        others = [more, additional, *first, *properties.values(), *patterns.values()]
        rule.optional += map(self._rule_of, others)


# llguidance does not look at keywords of other types than the schema's: they may be anything.
def _list(schema: dict[str, Any], key: str) -> list[Any]:
    return value if isinstance(value := schema.get(key), list) else []


def _dict(schema: dict[str, Any], key: str) -> dict[str, Any]:
    return value if isinstance(value := schema.get(key), dict) else {}


_NO_SCHEMAS = {"const", "enum", "default", "examples"}


def _absolute(base: str, reference: str) -> str:
    """`urljoin` knows fragments of common schemes only."""
    return base + reference if reference.startswith("#") else urljoin(base, reference)
