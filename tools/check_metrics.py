#!/usr/bin/env python3
"""Whether what watches a server fits it: `check_metrics.py MOED MOECTL CHECKPOINT`.

Starts moed with a checkpoint, a Prometheus that collects its metrics by the alert rules of deploy/alerts, and calls. Then:
every metric that the rules and the dashboard name was collected (those of a GPU only where there is one), every expression of the
dashboard is valid and has a result, every rule is evaluated without an error, no alert fires, promtool finds nothing wrong with the
metrics, and the rules' own tests pass. Needs prometheus and promtool on PATH. Ends with `N passed, N failed` and exit code 0 or 1.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request

ALERTS = "deploy/alerts"
DASHBOARD = "deploy/dashboards/moed.json"
LIMIT_S = 60  # a guard: usually all is there after five seconds
OF_GPU = {"moed_device_healthy", "moed_device_memory_free_bytes", "moed_device_memory_used_bytes"}
METRIC = re.compile(r"\b(?:moed|process)_[a-z_0-9]+\b(?!\s*=)")
results = []


def check(name, failures):
    """One line of the result; `failures` is a list of texts, empty when all is well."""
    results.append(not failures)
    print(f"{'passed' if not failures else 'FAILED'}: {name}")
    for text in failures:
        print(f"  {text}")


def wait_for(what, get):
    """The first true value of get()."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        try:
            value = get()
            if value:
                return value
        except (OSError, ValueError):
            pass
        time.sleep(0.1)
    sys.exit(f"check_metrics: {what}: not within {LIMIT_S} s")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def fetch(url):
    with urllib.request.urlopen(url, timeout=LIMIT_S) as answer:
        return answer.read().decode()


class Prometheus:
    """A server with its own folder, which collects from `target` every second."""

    def __init__(self, folder, target):
        self.url = f"http://127.0.0.1:{free_port()}"
        config = os.path.join(folder, "prometheus.yml")
        with open(config, "w") as file:
            json.dump({"global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                       "rule_files": [os.path.abspath(f"{ALERTS}/moed.rules.yml")],
                       "scrape_configs": [{"job_name": "moed", "static_configs": [{"targets": [target]}]}]}, file)
        self.process = subprocess.Popen(
            ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder}/data",
             f"--web.listen-address={self.url.removeprefix('http://')}", "--log.level=error"])

    def ask(self, path, **parameters):
        query = urllib.parse.urlencode(parameters)
        try:
            return json.loads(fetch(f"{self.url}/api/v1/{path}?{query}"))["data"]
        except urllib.error.HTTPError as error:
            return {"error": json.loads(error.read())["error"]}

    def value(self, expression):
        result = self.ask("query", query=expression).get("result", [])
        return float(result[0]["value"][1]) if result else None


def expressions(panels):
    for panel in panels:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]
        yield from expressions(panel.get("panels", []))


def promtool(name, arguments, folder=".", text=None):
    done = subprocess.run(["promtool", *arguments], cwd=folder, input=text, capture_output=True, text=True)
    check(name, [] if done.returncode == 0 else (done.stdout + done.stderr).strip().splitlines())


def check_names(prometheus, dashboard, has_gpu):
    with open(f"{ALERTS}/moed.rules.yml") as file:
        rules = re.sub(r"^\s*(runbook|summary):.*?(?=^\s*$|\Z)", "", file.read(), flags=re.M | re.S)
    texts = [text for _, text in expressions(dashboard["panels"])] + [rules] + [
        variable["definition"] for variable in dashboard["templating"]["list"] if "definition" in variable]
    names = {name for text in texts for name in METRIC.findall(text)}
    collected = set(prometheus.ask("label/__name__/values"))
    missing = sorted(names - collected - (set() if has_gpu else OF_GPU))
    check(f"{len(names)} metrics of rules and dashboard are collected", [f"{name} is not" for name in missing])
    return collected


def check_panels(prometheus, dashboard, has_gpu):
    failures, count = [], 0
    for title, expression in expressions(dashboard["panels"]):
        count += 1
        text = re.sub(r"\$(job|instance|model)\b", ".*", expression).replace("$__rate_interval", "1m")
        answer = prometheus.ask("query", query=text)
        if "error" in answer:
            failures.append(f"{title}: {answer['error']}: {text}")
        elif not answer["result"] and (has_gpu or not any(name in text for name in OF_GPU)):
            failures.append(f"{title}: no result: {text}")
    check(f"{count} expressions of the dashboard have results", failures)


def check_alerts(prometheus):
    def evaluated():
        found = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
        return found if all(rule["health"] != "unknown" for rule in found) else None

    rules = wait_for("rules", evaluated)
    check(f"{len(rules)} alert rules are evaluated", [f"{rule['name']}: {rule.get('lastError', '')}" for rule in rules
                                                     if rule["health"] != "ok"])
    check("no alert fires for a healthy server", [rule["name"] for rule in rules if rule["state"] != "inactive"])


def watch(folder, moed, moectl, checkpoint):
    ready = os.path.join(folder, "ready.json")
    recordings = os.path.join(folder, "recordings")
    os.mkdir(recordings)
    server = subprocess.Popen([moed, "serve", "--model", f"m={checkpoint}", "--listen", "127.0.0.1:0",
                               "--metrics-listen", "127.0.0.1:0", "--ready-file", ready, "--expert-metrics", "--record", recordings,
                               "--record-rate", "0", "--log-level", "warn"])
    prometheus = None
    try:
        addresses = wait_for("moed", lambda: os.path.exists(ready) and json.load(open(ready)))
        prometheus = Prometheus(folder, addresses["metrics_address"])
        wait_for("Prometheus", lambda: prometheus.value("moed_serving") == 1)
        subprocess.run([moectl, "--server", addresses["addresses"][0], "bench", "--layer", "1", "--tokens", "4",
                        "--concurrency", "2", "--seconds", "1"], check=True, stdout=subprocess.DEVNULL)
        wait_for("rates", lambda: (prometheus.value("sum(rate(moed_forwards_total[1m]))") or 0) > 0)
        with open(DASHBOARD) as file:
            dashboard = json.load(file)
        has_gpu = prometheus.value("moed_device_healthy") is not None
        check_names(prometheus, dashboard, has_gpu)
        check_panels(prometheus, dashboard, has_gpu)
        check_alerts(prometheus)
        text = fetch(f"http://{addresses['metrics_address']}/metrics")
        own = "\n".join(line for line in text.splitlines() if "exposer_" not in line) + "\n"
        promtool("promtool has nothing to say of the metrics", ["check", "metrics"], text=own)
        server.send_signal(signal.SIGTERM)
        check("moed ends well while it is watched", [] if server.wait(LIMIT_S) == 0 else [f"exit code {server.returncode}"])
    finally:
        for process in [server] + ([prometheus.process] if prometheus else []):
            process.kill()
            process.wait()


def main():
    if len(sys.argv) != 4:
        sys.exit("usage: check_metrics.py MOED MOECTL CHECKPOINT")
    promtool("promtool takes the alert rules", ["check", "rules", "moed.rules.yml"], ALERTS)
    promtool("the tests of the alert rules pass", ["test", "rules", "moed.rules_test.yml"], ALERTS)
    with tempfile.TemporaryDirectory() as folder:
        watch(folder, *sys.argv[1:])
    print(f"{sum(results)} passed, {len(results) - sum(results)} failed")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
