#!/usr/bin/env bash
# Everything that waits for a GPU, in steps that end within nine minutes.
#
#   bash benchmarks/gpu.sh [STEP...]             the steps that are named, or all; what has left its result is not run again
#   bash benchmarks/gpu.sh --list                the steps, and which of them have left their result
#   bash benchmarks/gpu.sh --dry-run [STEP...]   at toy size on the CPU, into a temporary folder
#
#   --out DIR       where results and gpu.log go, instead of benchmarks/results
#   --seconds N     the most that a step may take, instead of 520; it goes on there when it is run again
#   --minutes N     the most that all of it may take, such as 55 or 7.5; what is left goes on when it is run again
#
# Before it starts it prints its plan: every step, what it measures, and about how long it takes.
# vllm-3b, the load of vllm_load.py, needs vLLM beside the rest, and runs only where it is named.
#
# `make gpu-wheels` fills wheels/ for a machine without network. Exit code: 0, every step has its result; 1, a step
# failed; 2, an argument is wrong or something is missing; 3, a step or the whole ran out of time: run the same
# command again; 130, interrupted: the same command goes on.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

PYTHON=${PYTHON:-python3}
NEEDS="av typer rich peft qwen_vl_utils ruamel.yaml pydantic psutil text_to_num matplotlib accelerate safetensors PIL torchvision pytest hypothesis"
STEPS=(device speed-3b memory-3b scaling-3b train-3b frames-3b)
for shape in internvl2.5-8b llava-video-7b qwen3-vl-8b qwen3.5-9b; do
    STEPS+=("speed-$shape" "memory-$shape" "scaling-$shape")
done

# What a step that is stopped gets to end by itself, and what it needs at the least to be started.
GRACE=15 LEAST=3

fail() { echo "gpu.sh: $1" >&2; exit 2; }

results="" seconds=520 minutes="" dry=false list=false chosen=()
while (($#)); do
    case $1 in
        --dry-run) dry=true ;;
        --list) list=true ;;
        --out | --seconds | --minutes)
            (($# > 1)) || fail "$1 has no value"
            case $1 in
                --out) results=$2 ;;
                --seconds) seconds=$2 ;;
                --minutes) minutes=$2 ;;
            esac
            shift ;;
        -*) fail "there is no option $1; expected --list, --dry-run, --out DIR, --seconds N or --minutes N" ;;
        *) [[ " ${STEPS[*]} vllm-3b " == *" $1 "* ]] || fail "there is no step $1; expected some of: ${STEPS[*]} vllm-3b"
            chosen+=("$1") ;;
    esac
    shift
done
[[ $seconds =~ ^[1-9][0-9]*$ ]] || fail "--seconds is $seconds; expected a whole number from 1 on"
deadline="" # in seconds from the start of the script, which bash counts in SECONDS
if [[ -n $minutes ]]; then
    [[ $minutes =~ ^[0-9]+(\.[0-9]+)?$ && $minutes =~ [1-9] ]] || fail "--minutes is $minutes; expected a number above 0"
    deadline=$(awk "BEGIN { print int(60 * $minutes) }")
fi
if [[ -z $results ]]; then
    if $dry && ! $list; then results=$(mktemp -d); else results=benchmarks/results; fi
fi
((${#chosen[@]})) || chosen=("${STEPS[@]}")

# The model's shape of a step, as `python -m benchmarks` knows it.
shape_of() {
    local shape=${1#*-}
    if $dry; then [[ $shape == 3b ]] && echo tiny || echo "$shape-tiny"; else echo "$shape"; fi
}

result_of() {
    local shape
    shape=$(shape_of "$1")
    [[ $shape == 3b ]] && shape=gpu
    case $1 in
        device) echo "$results/gpu-$1.json" ;;
        frames-*) echo "$results/frames/speed-$shape.json" ;;
        *) echo "$results/${1%%-*}-$shape.json" ;;
    esac
}

if $list; then
    for step in "${STEPS[@]}"; do
        [[ -f $(result_of "$step") ]] && echo "$step: $(result_of "$step")" || echo "$step: no result yet"
    done
    exit 0
fi

# --------------------------------------------------------------------------------------------------------------------
# Needs
# --------------------------------------------------------------------------------------------------------------------

check_needs() {
    "$PYTHON" - "$dry" $NEEDS <<'PYTHON'
import importlib
import sys

dry, *needs = sys.argv[1:]
missing = []
for name in needs:
    try:
        importlib.import_module(name)
    except ImportError as error:
        missing.append(f"{name} ({error})")
if missing:
    sys.exit("gpu.sh: missing on this machine: " + ", ".join(missing))
import torch
import transformers

if dry == "false" and not torch.cuda.is_available():
    sys.exit("gpu.sh: PyTorch finds no GPU; --dry-run runs the steps at toy size on the CPU")
from benchmarks.machine import environment

device = "CPU" if dry == "true" else torch.cuda.get_device_name()
print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, transformers {transformers.__version__}, {device}")
print(f"Processor: {environment('cpu')['processor']}")
PYTHON
}

site=$PWD/build/gpu-site
export PYTHONPATH="$PWD/src:$site${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
if ! check_needs; then
    compgen -G "wheels/*.whl" >/dev/null || fail "see above; packages can come from wheels/, which make gpu-wheels fills"
    echo "Installing wheels/ into $site"
    "$PYTHON" -m pip install -q --no-index --no-deps --upgrade --target "$site" wheels/*.whl && check_needs || exit 2
fi
mkdir -p "$results" || fail "cannot write to $results"
results=$(cd "$results" && pwd)
log=$results/gpu.log

# --------------------------------------------------------------------------------------------------------------------
# Steps
# --------------------------------------------------------------------------------------------------------------------

# Sets `command`: what a step runs.
set_command() {
    local shape tests
    shape=$(shape_of "$1")
    case $1 in
        device)
            tests=(tests/model/test_device.py tests/model/test_vision_attention.py)
            $dry && tests=(tests/model/test_device.py -k attention)
            command=("$PYTHON" -m benchmarks.run_tests "$(result_of "$1")" "${tests[@]}")
            ;;
        vllm-*)  # the tiny shape has positions that vLLM does not take
            $dry && shape=small
            command=("$PYTHON" -m benchmarks.vllm_load "$(result_of "$1")" "$shape")
            ;;
        frames-*) command=(measure speed --sweep --repeats 1 --out "$results/frames") ;;
        speed-*) command=(measure speed --no-sweep --repeats 3 --out "$results") ;;
        train-*) command=(measure training-step --repeats 3 --out "$results") ;;
        *) command=(measure "${1%%-*}" --repeats 3 --out "$results") ;;
    esac
    if [[ ${command[0]} == measure ]]; then
        command=("$PYTHON" -m benchmarks "${command[@]:1}" --shape "$shape")
        if $dry; then
            command+=(--device cpu --repeats 1)
            if [[ $1 == scaling-* ]]; then command+=(--size 300 --size 600); else command+=(--dtype float32); fi
        fi
    fi
}

purpose_of() {
    case $1 in
        device) echo "tests of what a GPU does otherwise than a CPU" ;;
        speed-*) echo "seconds to the first token and of every stage, beside stock" ;;
        memory-*) echo "peak memory beside stock, each side in a process of its own" ;;
        scaling-*) echo "time and memory of the selection of up to 1,000,000 tokens" ;;
        train-*) echo "time and memory of a training step" ;;
        frames-*) echo "seconds to the first token over the number of frames" ;;
        vllm-*) echo "the load of a vLLM server" ;;
    esac
}

# About how many seconds a step takes. At toy size: measured on two busy cores of an AMD EPYC. At full size: by arithmetic,
# since no GPU has been measured. That is the cost model for an H100 at 0.4 of its speed, warm-up and repeats included,
# and what 16 cores take to render, read and load.
expected_of() {
    if $dry; then
        case $1 in
            device) echo 17 ;;
            memory-*) echo 140 ;;
            scaling-*) echo 70 ;;
            *) echo 25 ;;
        esac
    else
        case $1 in
            device) echo 60 ;;
            speed-3b) echo 360 ;;
            frames-3b) echo 700 ;;
            memory-3b) echo 180 ;;
            train-3b) echo 120 ;;
            speed-qwen3-vl-8b) echo 500 ;;
            speed-qwen3.5-9b) echo 450 ;;
            memory-qwen*) echo 210 ;;
            speed-* | memory-*) echo 120 ;;
            scaling-*) echo 100 ;;
            vllm-*) echo 500 ;;
        esac
    fi
}

print_plan() {
    local step about count=0 total=0
    echo "Plan:"
    for step in "${chosen[@]}"; do
        if [[ -f $(result_of "$step") ]]; then
            printf '  %-24s has its result\n' "$step"
        else
            about=$(expected_of "$step")
            count=$((count + 1)) total=$((total + about))
            printf '  %-24s about %3d s  %s\n' "$step" "$about" "$(purpose_of "$step")"
        fi
    done
    echo "To run: $count steps, about $(((total + 59) / 60)) minutes together, at most $seconds s each; log: $log"
    $dry || echo "The times are arithmetic: no GPU has been measured."
    if [[ -n $deadline ]]; then echo "All of it ends within $minutes minutes of its start; what is left goes on later."; fi
}

print_plan
failed=() unfinished=() interrupted=false
for step in "${chosen[@]}"; do
    if [[ -f $(result_of "$step") ]]; then
        echo "$step: has its result, $(result_of "$step")"
        continue
    fi
    most=$seconds
    if [[ -n $deadline ]]; then
        left=$((deadline - SECONDS - GRACE))
        ((left < most)) && most=$left
    fi
    if $interrupted || ((most < LEAST && most < seconds)); then
        unfinished+=("$step")
        continue
    fi
    set_command "$step"
    echo "== $(date -u +%FT%TZ) $step, at most $most s: ${command[*]}" | tee -a "$log"
    # An interruption loses nothing: benchmarks keep what they have measured, and go on.
    timeout --foreground --signal=INT --kill-after="$GRACE" "$most" "${command[@]}" 2>&1 | tee -a "$log"
    code=${PIPESTATUS[0]}
    if [[ $code == 124 || $code == 137 ]]; then
        unfinished+=("$step")
    elif [[ $code == 130 ]]; then  # somebody pressed Ctrl-C
        unfinished+=("$step")
        interrupted=true
    elif [[ $code != 0 || ! -f $(result_of "$step") ]]; then
        failed+=("$step")
    fi
    echo "== $(date -u +%FT%TZ) $step: exit code $code" | tee -a "$log"
done

for step in "${failed[@]}"; do echo "failed: $step" | tee -a "$log"; done
for step in "${unfinished[@]}"; do echo "ran out of time, goes on when it is run again: $step" | tee -a "$log"; done
$interrupted && exit 130
((${#failed[@]})) && exit 1
((${#unfinished[@]})) && exit 3
exit 0
