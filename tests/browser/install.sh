#!/usr/bin/env bash
# Gives the browser tests their browser: Debian's Chromium, driven by Playwright, which comes with the dev extra.
# Never fails: without a browser the tests say why they are skipped.
set -uo pipefail

if command -v chromium >/dev/null || command -v chromium-browser >/dev/null; then
    exit 0
fi
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "chromium is missing and cannot be installed here (not root, or no apt-get): the browser tests will be skipped" >&2
    exit 0
fi
echo "installing chromium by apt-get for the browser tests" >&2
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update && apt-get install -y --no-install-recommends chromium; } >/dev/null 2>&1; then
    echo "chromium could not be installed by apt-get: the browser tests will be skipped" >&2
fi
exit 0
