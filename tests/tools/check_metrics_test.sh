#!/usr/bin/env bash
# Dashboard, alert rules and metrics fit together, with a real moed under a real Prometheus (tools/check_metrics.py); and a metric that
# does not exist is found where it is planted.
# Usage: check_metrics_test.sh, in the runfiles of its target.
set -euo pipefail

if ! command -v prometheus >/dev/null || ! command -v promtool >/dev/null; then
  echo "SKIP check_metrics_test: there is no prometheus on PATH"
  echo "MOED-TEST-RESULT passed=0 failed=0 skipped=1"
  exit 0
fi
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT

# check FOLDER: the check of what is deployed from there.
check() {
  local root="$PWD"
  (cd "$1" && python3 "$root/tools/check_metrics.py" "$root/server/moed" "$root/client/moectl" "$root/tests/data/ct-w4a16-g32-sym")
}

passed=0
failed=0
if check . | tee "$folder/log"; then passed=$((passed + 1)); else failed=$((failed + 1)); fi

cp -rL deploy "$folder/deploy"
chmod -R u+w "$folder/deploy"
sed -i 's/moed_queue_calls/moed_queue_cells/' "$folder/deploy/dashboards/moed.json"
code=0
check "$folder" >"$folder/log" || code=$?
if ((code == 1)) && grep -q '^  moed_queue_cells is not$' "$folder/log" && grep -q '^  Waiting: no result' "$folder/log"; then
  passed=$((passed + 1))
else
  failed=$((failed + 1))
  echo "FAILED: a planted metric was not found, exit code $code"
  cat "$folder/log"
fi
printf 'MOED-TEST-RESULT passed=%d failed=%d skipped=0\n' "$passed" "$failed"
((failed == 0))
