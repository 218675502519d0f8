// A libcuda.so.1 for machines without a GPU: it runs nothing, but refuses what a driver refuses, and records launches.
//
//   cuModuleLoadData    the cubin's own ELF: architecture, kernels, their .nv.info; not while a stream is captured
//   cuFuncSetAttribute  opt-in shared memory up to the device's limit
//   cuLaunchKernel      context current, grid and block limits, opted-in shared memory, parameter buffer of exactly the
//                       size that the cubin declares
//
// The device comes from the environment: KVB_MOCK_ARCH (90), KVB_MOCK_SMS (132), KVB_MOCK_DEVICES (1). KVB_MOCK_FAIL is
// `name:code`: that function fails with that CUresult. Tests read the mock_* functions through ctypes.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
  kSuccess = 0, kInvalidValue = 1, kNotInitialized = 3, kNoDevice = 100, kInvalidDevice = 101, kInvalidImage = 200,
  kInvalidContext = 201, kNoBinary = 209, kInvalidHandle = 400, kNotFound = 500, kNotSupported = 801,
  kCaptureUnsupported = 900,
};
enum { kMaxDevices = 8, kMaxModules = 256, kMaxKernels = 32, kMaxStack = 16, kMaxCaptures = 8, kKept = 64, kMaxBytes = 4096 };
enum { kPlainShared = 49152, kEiattrMaxThreads = 0x05, kEiattrParamCbank = 0x0a, kEiattrKparamInfo = 0x17 };

typedef struct { int device, retained; } Context;
typedef struct Module Module;
typedef struct {
  Module* module;
  char name[256];
  int parameter_bytes, declared_bytes, max_threads, dynamic_limit;
} Kernel;
struct Module { Context* context; int kernels; Kernel kernel[kMaxKernels]; };

// What one launch looked like; mirrored in tests/kernels/mock_driver.py.
typedef struct {
  char name[256];
  uint32_t grid[3], block[3], shared_bytes, parameter_bytes;
  uint64_t stream;
  int32_t device, captured;
  unsigned char parameters[kMaxBytes];
} Launch;

static int initialised, modules, captures, keep = 1;
static Context contexts[kMaxDevices];
static Module* module_of[kMaxModules];
static uint64_t captured_stream[kMaxCaptures];
static Launch kept[kKept];
static long launches, loads;
static char last_refusal[256];
static __thread Context* stack[kMaxStack];
static __thread int depth;

static int setting(const char* name, int otherwise) {
  const char* text = getenv(name);
  return text ? atoi(text) : otherwise;
}
static int arch(void) { return setting("KVB_MOCK_ARCH", 90); }
static int devices(void) { return setting("KVB_MOCK_DEVICES", 1); }
static int opt_in(void) {  // CUDA C++ Programming Guide, technical specifications per compute capability
  switch (arch()) {
    case 80: case 87: return 163 * 1024;
    case 86: case 89: case 120: case 121: return 99 * 1024;
    default: return 227 * 1024;
  }
}
static int refuse(int code, const char* why) {
  snprintf(last_refusal, sizeof last_refusal, "%s", why);
  return code;
}
static int injected(const char* function) {
  const char* text = getenv("KVB_MOCK_FAIL");
  const size_t length = strlen(function);
  return text && !strncmp(text, function, length) && text[length] == ':' ? atoi(text + length + 1) : 0;
}
#define BEGIN(function)                                                             \
  do {                                                                              \
    const int code = injected(function);                                            \
    if (code) return refuse(code, "injected");                                      \
    if (!initialised) return refuse(kNotInitialized, function " before cuInit");    \
  } while (0)

// For the tests.
long mock_launches(void) { return launches; }
long mock_loads(void) { return loads; }
void mock_keep(int on) { keep = on; }
const char* mock_refusal(void) { return last_refusal; }
const Launch* mock_launch(long index) { return index < launches && index >= launches - kKept ? &kept[index % kKept] : 0; }
size_t mock_launch_bytes(void) { return sizeof(Launch); }
void mock_capture_begin(uint64_t stream) { if (captures < kMaxCaptures) captured_stream[captures++] = stream; }
void mock_capture_end(void) { captures = 0; }
int mock_current_device(void) { return depth ? stack[depth - 1]->device : -1; }
int mock_context_depth(void) { return depth; }
static int capturing(uint64_t stream) {
  for (int i = 0; i < captures; ++i) if (captured_stream[i] == stream) return 1;
  return 0;
}

// Initialisation and devices.
int cuInit(unsigned flags) {
  const int code = injected("cuInit");
  if (code) return refuse(code, "injected");
  if (flags) return refuse(kInvalidValue, "cuInit flags");
  if (!devices()) return refuse(kNoDevice, "no device");
  initialised = 1;
  return kSuccess;
}
int cuDriverGetVersion(int* version) { *version = 13000; return kSuccess; }
int cuDeviceGetCount(int* count) { *count = devices(); return kSuccess; }
int cuDeviceGet(int* device, int ordinal) {
  BEGIN("cuDeviceGet");
  if (ordinal < 0 || ordinal >= devices() || ordinal >= kMaxDevices) return refuse(kInvalidDevice, "device ordinal");
  *device = ordinal;
  return kSuccess;
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  BEGIN("cuDeviceGetAttribute");
  if (device < 0 || device >= devices()) return refuse(kInvalidDevice, "device");
  switch (attribute) {
    case 16: *value = setting("KVB_MOCK_SMS", 132) + device; return kSuccess;  // each device differs: a mix-up shows
    case 75: *value = arch() / 10; return kSuccess;
    case 76: *value = arch() % 10; return kSuccess;
    case 97: *value = opt_in(); return kSuccess;
    default: return refuse(kInvalidValue, "attribute");
  }
}

// Contexts.
int cuDevicePrimaryCtxRetain(Context** context, int device) {
  BEGIN("cuDevicePrimaryCtxRetain");
  if (device < 0 || device >= devices()) return refuse(kInvalidDevice, "device");
  contexts[device].device = device;
  ++contexts[device].retained;
  *context = &contexts[device];
  return kSuccess;
}
int cuCtxPushCurrent_v2(Context* context) {
  BEGIN("cuCtxPushCurrent");
  if (context < contexts || context >= contexts + kMaxDevices || !context->retained || depth == kMaxStack)
    return refuse(kInvalidContext, "context pushed");
  stack[depth++] = context;
  return kSuccess;
}
int cuCtxPopCurrent_v2(Context** context) {
  BEGIN("cuCtxPopCurrent");
  if (!depth) return refuse(kInvalidContext, "no context to pop");
  *context = stack[--depth];
  return kSuccess;
}
int cuCtxGetCurrent(Context** context) { *context = depth ? stack[depth - 1] : 0; return kSuccess; }

// Modules: an ELF of machine 190 with one .text and one .nv.info section for each kernel.
static void read_info(Kernel* kernel, const unsigned char* at, const unsigned char* end) {
  while (at + 4 <= end) {
    const int format = at[0], attribute = at[1], value = at[2] | at[3] << 8;
    const unsigned char* payload = at + 4;
    at = payload + (format == 4 ? value : 0);  // EIFMT_SVAL carries `value` bytes, other formats the value itself
    if (format != 4 || at > end) continue;
    uint32_t words[3] = {0, 0, 0};
    memcpy(words, payload, (size_t)(value < 12 ? value : 12));
    if (attribute == kEiattrParamCbank) kernel->parameter_bytes = (int)(words[1] >> 16);
    if (attribute == kEiattrKparamInfo) kernel->declared_bytes += (int)(words[2] >> 18);
    if (attribute == kEiattrMaxThreads) kernel->max_threads = (int)words[0];
  }
}
int cuModuleLoadData(Module** out, const void* image) {
  BEGIN("cuModuleLoadData");
  if (captures) return refuse(kCaptureUnsupported, "module load while a stream is captured");
  if (!depth) return refuse(kInvalidContext, "module load without a current context");
  const unsigned char* bytes = image;
  const Elf64_Ehdr* header = image;
  if (memcmp(header->e_ident, ELFMAG, SELFMAG) || header->e_machine != 190) return refuse(kInvalidImage, "no cubin");
  const int built_for = (int)(header->e_flags >> 8 & 0xff), device = arch();
  if (built_for / 10 != device / 10 || built_for > device || (device >= 90 && built_for != device))
    return refuse(kNoBinary, "architecture of the cubin");
  if (modules == kMaxModules) return refuse(kInvalidValue, "more modules than the mock holds");
  Module* module = calloc(1, sizeof *module);
  module->context = stack[depth - 1];
  const Elf64_Shdr* section = (const Elf64_Shdr*)(bytes + header->e_shoff);
  const char* names = (const char*)bytes + section[header->e_shstrndx].sh_offset;
  for (int i = 0; i < header->e_shnum && module->kernels < kMaxKernels; ++i) {
    const char* name = names + section[i].sh_name;
    if (strncmp(name, ".nv.info.", 9)) continue;
    Kernel* kernel = &module->kernel[module->kernels++];
    snprintf(kernel->name, sizeof kernel->name, "%s", name + 9);
    kernel->module = module;
    kernel->dynamic_limit = kPlainShared;
    read_info(kernel, bytes + section[i].sh_offset, bytes + section[i].sh_offset + section[i].sh_size);
  }
  if (!module->kernels) { free(module); return refuse(kInvalidImage, "a cubin without kernels"); }
  module_of[modules++] = module;
  ++loads;
  *out = module;
  return kSuccess;
}
static int known(const Module* module) {
  for (int i = 0; i < modules; ++i) if (module_of[i] == module) return 1;
  return 0;
}
int cuModuleGetFunction(Kernel** out, Module* module, const char* name) {
  BEGIN("cuModuleGetFunction");
  if (!known(module)) return refuse(kInvalidHandle, "module");
  for (int i = 0; i < module->kernels; ++i)
    if (!strcmp(module->kernel[i].name, name)) { *out = &module->kernel[i]; return kSuccess; }
  return refuse(kNotFound, "kernel name");
}
int cuFuncSetAttribute(Kernel* kernel, int attribute, int value) {
  BEGIN("cuFuncSetAttribute");
  if (captures) return refuse(kCaptureUnsupported, "attribute set while a stream is captured");
  if (!kernel || !known(kernel->module)) return refuse(kInvalidHandle, "function");
  if (attribute != 8) return refuse(kInvalidValue, "function attribute");
  if (value < 0 || value > opt_in()) return refuse(kInvalidValue, "shared memory above the opt-in limit");
  kernel->dynamic_limit = value > kPlainShared ? value : kPlainShared;
  return kSuccess;
}

// Streams and launches.
int cuStreamIsCapturing(uint64_t stream, int* status) {
  BEGIN("cuStreamIsCapturing");
  *status = capturing(stream);
  return kSuccess;
}
int cuLaunchKernel(Kernel* kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, uint64_t stream, void** parameters, void** extra) {
  BEGIN("cuLaunchKernel");
  if (!kernel || !known(kernel->module)) return refuse(kInvalidHandle, "function");
  if (!depth) return refuse(kInvalidContext, "launch without a current context");
  if (stack[depth - 1] != kernel->module->context) return refuse(kInvalidHandle, "function of another context");
  if (!gx || !gy || !gz || gx > 0x7fffffffu || gy > 65535 || gz > 65535) return refuse(kInvalidValue, "grid");
  if (!bx || !by || !bz || (uint64_t)bx * by * bz > (uint64_t)(kernel->max_threads ? kernel->max_threads : 1024))
    return refuse(kInvalidValue, "threads of a block");
  if (shared > (unsigned)kernel->dynamic_limit) return refuse(kInvalidValue, "shared memory not opted into");
  if (parameters || !extra) return refuse(kInvalidValue, "parameters as an array: a buffer with its size is expected");
  const void* buffer = 0;
  size_t size = 0;
  for (void** at = extra; *at; at += 2) {
    if (*at == (void*)1) buffer = at[1];
    else if (*at == (void*)2) size = *(size_t*)at[1];
    else return refuse(kInvalidValue, "launch option");
  }
  if (kernel->parameter_bytes != kernel->declared_bytes) return refuse(kInvalidImage, "parameter sizes of the cubin");
  if (!buffer || size != (size_t)kernel->parameter_bytes || size > kMaxBytes)
    return refuse(kInvalidValue, "size of the parameter buffer");
  if (keep) {
    Launch* launch = &kept[launches % kKept];
    snprintf(launch->name, sizeof launch->name, "%s", kernel->name);
    launch->grid[0] = gx, launch->grid[1] = gy, launch->grid[2] = gz;
    launch->block[0] = bx, launch->block[1] = by, launch->block[2] = bz;
    launch->shared_bytes = shared, launch->parameter_bytes = (uint32_t)size, launch->stream = stream;
    launch->device = kernel->module->context->device, launch->captured = capturing(stream);
    memcpy(launch->parameters, buffer, size);
  }
  ++launches;
  return kSuccess;
}

// Errors and symbol look-up. NVRTC asks any libcuda it can load for private tables, and lives with a refusal.
int cuGetExportTable(const void** table, const void* id) { (void)table, (void)id; return kNotSupported; }
int cuGetErrorString(int code, const char** text) {
  static __thread char held[300];
  snprintf(held, sizeof held, "mock driver: %s (code %d)", last_refusal, code);
  *text = held;
  return kSuccess;
}
int cuGetErrorName(int code, const char** text) { (void)code; *text = "CUDA_ERROR"; return kSuccess; }
static int absent(void) { return kNotSupported; }
int cuGetProcAddress_v2(const char* name, void** pointer, int version, uint64_t flags, int* status) {
  char second[256];
  (void)version, (void)flags;
  snprintf(second, sizeof second, "%s_v2", name);
  void* own = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  void* found = own ? dlsym(own, second) : 0;
  if (!found && own) found = dlsym(own, name);
  *pointer = found ? found : (void*)absent;
  if (status) *status = 0;
  return kSuccess;
}
int cuGetProcAddress(const char* name, void** pointer, int version, uint64_t flags) {
  return cuGetProcAddress_v2(name, pointer, version, flags, 0);
}
