#!/usr/bin/env bash
# Installs the peers of `rollout-service bench peers`, each in an environment of its own below $PEERS_HOME
# (default ~/.cache/rollout-peers), never into this project's.  Usage: install.sh [puf] [sf] [sb3] [torchrl] [rllib] [tianshou]
set -eu
home=${PEERS_HOME:-$HOME/.cache/rollout-peers}
torch=${PEERS_TORCH:-torch==2.13.0}
python=${PYTHON:-python3}

install_puf() {
  # 3.0.0 as published does not build without its native games: they are left out.
  "$pip" install -q "$torch" 'setuptools<81' wheel cython 'numpy<2' gymnasium==0.29.1
  local tmp src
  tmp=$(mktemp -d)
  # Its metadata cannot be made, so the download "fails"; what is needed is the unpacked source that it leaves.
  TMPDIR=$tmp "$pip" download -q --no-clean --no-deps --no-binary :all: -d "$tmp" pufferlib==3.0.0 >/dev/null 2>&1 || true
  src=$(ls -d "$tmp"/pip-*/pufferlib_* | head -n 1)
  "$home/puf/bin/python" - "$src/setup.py" <<'PY'
import pathlib
import sys

path = pathlib.Path(sys.argv[1])
text = path.read_text()
text = text.replace("if not NO_OCEAN:\n    c_extension_paths", "c_extension_paths = []\nif not NO_OCEAN:\n    c_extension_paths", 1)
path.write_text(text.replace("extra_objects=[RAYLIB_A]", "extra_objects=[]"))
PY
  # An nvcc on the PATH without CUDA_HOME makes the build fail: /usr/local/bin is hidden.
  (cd "$src" && PATH=$(printf %s "$PATH" | tr : '\n' | grep -v '^/usr/local/bin$' | paste -sd:) NO_OCEAN=1 \
    "$pip" install -q --no-build-isolation .)
  rm -rf "$tmp"
}

[ $# -gt 0 ] || set -- puf sf sb3 torchrl rllib tianshou
mkdir -p "$home"
for peer; do
  case $peer in puf | sf | sb3 | torchrl | rllib | tianshou) ;; *) echo "unknown peer $peer" >&2; exit 2 ;; esac
  [ -x "$home/$peer/bin/python" ] || "$python" -m venv "$home/$peer"
  pip="$home/$peer/bin/pip"
  case $peer in
    puf) install_puf ;;
    sf) "$pip" install -q "$torch" sample-factory==2.1.1 gymnasium numpy ;;
    sb3) "$pip" install -q "$torch" sb3-contrib==2.9.2 gymnasium==1.4.0 ;;
    torchrl) "$pip" install -q "$torch" torchrl==0.14.1 'tensordict<0.15' gymnasium==1.4.0 numpy ;;
    tianshou) "$pip" install -q "$torch" tianshou==2.0.1 ;; # for `rollout-service bench gae`
    rllib) "$pip" install -q "$torch" 'ray[rllib]==2.60.0' gymnasium ;;
  esac
  echo "$peer installed in $home/$peer"
done
