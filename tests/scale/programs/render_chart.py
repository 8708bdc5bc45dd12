"""Lint a chart and render it with the values on stdin; prints both as JSON, or what was wrong.

Usage: render_chart.py CHART RELEASE NAMESPACE
"""

import json
import sys

import helm_python

directory, release, namespace = sys.argv[1:]
values = json.load(sys.stdin)
try:
    report = helm_python.lint(directory, values, strict=True)
    chart = helm_python.Chart.load(directory)
    chart.validate_schema(values)
    rendered = chart.render(values, name=release, namespace=namespace)
    print(json.dumps({"lint": report, "rendered": rendered}))
except helm_python.HelmError as error:
    print(json.dumps({"error": str(error)}))
