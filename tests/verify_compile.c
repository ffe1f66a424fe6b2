/*
 * A library to load in place of libSynapse.so, so that Intel's PyTorch bridge and graph compiler compile graphs on a
 * machine without a Gaudi. tests/verify_compile.py builds it, for `make verify-gaudi MODE=compile`.
 *
 * THIS LIBRARY HAS NEVER RUN WITH INTEL'S SOFTWARE. Only its behavior towards a stand-in for libSynapse was tested. It
 * was written from the published interface (HabanaAI/Intel_Gaudi3_Software at e6cef1c3, synapse/include/synapse_api.h)
 * and from how bridge 1.19.0 uses it (HabanaAI/gaudi-pytorch-bridge at 5a56187e). Paths below are in these two.
 *
 * How the bridge calls the runtime. It opens libSynapse.so by name, and looks up 106 syn... and 21 hccl... functions in
 * that handle; it ends the process if one is missing (pytorch_helpers/synapse_shim/synapse_api_shim.cpp:35, 47, 114;
 * synapse_api_shim.h:23-129; hccl_api_shim.h). A preloaded library is therefore never asked, and this one must be found
 * before the original, through LD_LIBRARY_PATH. It is linked against the original by its absolute path, and dlsym on a
 * handle also searches the dependencies of a library. A function that is not defined here, known or unknown, is thus
 * the original one. That includes everything that builds, compiles and describes graphs.
 *
 * Why that suffices for compiling. The original compiles without a device: synGraphCompile takes a graph only, a graph
 * knows its device's type, and a recipe contains the size of its workspace (in synapse/src/runtime/common:
 * syn_singleton_graph.cpp:57-97 and 647-690, syn_singleton.cpp:946-952). synInitialize opens no device
 * (syn_singleton.cpp:222-306 and 555-572). Attributes such as the alignment of addresses are known for a type of device
 * (device/device_manager.cpp:451). The bridge itself can be told not to launch (backend/synapse_helpers/graph.cpp:845),
 * which warm-up does, but it still acquires a device, allocates its memory, and copies.
 *
 * What is replaced: devices, streams, events, launches, copies, and memory that the device sees. A device address is
 * only a number. It is not an address of the host, so that reading it would end the process. Copies to the device are
 * dropped. Copies to the host are zeros, so that no result is garbage. Collectives are not replaced: one rank only.
 *
 * Environment: COMPILE_ONLY_CARD is gaudi2 or gaudi3. Lines are appended to the file COMPILE_ONLY_LOG: "loaded", and
 * for each graph "compile", the status, microseconds, bytes of workspace and the recipe's name, separated by tabs.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#ifndef REAL_LIBRARY
#error "-DREAL_LIBRARY= must name the original libSynapse.so"
#endif

/* Values of the interface: synapse/include/synapse_common_types.h and synapse_api_types.h. */
enum { SUCCESS = 0, INVALID_ARGUMENT = 1, OUT_OF_DEVICE_MEMORY = 4, NO_DEVICE = 8 };
enum { DEVICE_GAUDI2 = 4, DEVICE_GAUDI3 = 5 };
enum { TO_HOST = 1 };
enum { DRAM_BASE = 1, DRAM_SIZE = 3, DRAM_FREE = 4, TPC_MASK = 5 };

typedef uint32_t Device;
typedef void *Handle;

/* The common start of both structures that describe a device, then what the second one adds. */
typedef struct {
    uint64_t sram_base, dram_base;
    uint32_t sram_size;
    uint64_t dram_size, tpc_mask;
    uint8_t has_dram;
    uint32_t id, file;
    int type;
} Info;

typedef struct {
    Info info;
    uint8_t index;
    uint64_t reserved;
} InfoV2;

typedef struct Block {
    uint64_t address, size;
    struct Block *next;
} Block;

#define PAGE 4096

static pthread_mutex_t memory_lock = PTHREAD_MUTEX_INITIALIZER;
static Block *blocks;
static uint64_t bytes_used, bytes_passed;
static atomic_uintptr_t last_handle;

/* ---- the original library and the log -------------------------------------------------------------------------- */

static void *find_real(const char *name) {
    void *library = dlopen(REAL_LIBRARY, RTLD_NOW | RTLD_NOLOAD);
    void *found = library ? dlsym(library, name) : NULL;
    if (!found) {
        fprintf(stderr, "verify_compile.c: %s has no %s\n", REAL_LIBRARY, name);
        abort();
    }
    return found;
}

static void write_line(const char *line, size_t length) {
    const char *path = getenv("COMPILE_ONLY_LOG");
    if (!path) return;
    int file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    /* Threads compile at the same time. One write of a short line is not interleaved with others. */
    if (file < 0 || write(file, line, length) != (ssize_t)length) {
        perror(path);
        abort();
    }
    close(file);
}

__attribute__((constructor)) static void log_loading(void) { write_line("loaded\n", 7); }

static int card_type(void) {
    const char *card = getenv("COMPILE_ONLY_CARD");
    return card && !strcmp(card, "gaudi3") ? DEVICE_GAUDI3 : DEVICE_GAUDI2;
}

static uint64_t memory_size(void) { return (card_type() == DEVICE_GAUDI3 ? 128ull : 96ull) << 30; }

/* Neither is an address of an x86 host: specs_h9/gaudi3/gaudi3.h:42 and specs/gaudi2/gaudi2.h:43. */
static uint64_t memory_base(void) { return card_type() == DEVICE_GAUDI3 ? 0x0201000000000000u : 0x1001000000000000u; }

/* ---- compiling: the original function, timed ------------------------------------------------------------------- */

int synGraphCompile(Handle *recipe, Handle graph, const char *name, const char *build_log) {
    int (*compile)(Handle *, Handle, const char *, const char *) = find_real("synGraphCompile");
    int (*workspace_size)(uint64_t *, Handle) = find_real("synWorkspaceGetSize");
    struct timespec before, after;
    uint64_t workspace = 0;
    char line[512];
    clock_gettime(CLOCK_MONOTONIC, &before);
    int status = compile(recipe, graph, name, build_log);
    clock_gettime(CLOCK_MONOTONIC, &after);
    if (status == SUCCESS) workspace_size(&workspace, *recipe);
    long long took = (after.tv_sec - before.tv_sec) * 1000000ll + (after.tv_nsec - before.tv_nsec) / 1000;
    int length = snprintf(line, sizeof line, "compile\t%d\t%lld\t%llu\t%.400s\n", status, took,
                          (unsigned long long)workspace, name ? name : "");
    write_line(line, (size_t)length);
    return status;
}

/* ---- the device ------------------------------------------------------------------------------------------------ */

static int acquire(Device *device, int type) {
    if (type != card_type()) return NO_DEVICE;
    *device = 0;
    return SUCCESS;
}

int synDeviceAcquire(Device *device, const char *bus) { return acquire(device, card_type()); }
int synDeviceAcquireByDeviceType(Device *device, int type) { return acquire(device, type); }
int synDeviceAcquireByModuleId(Device *device, uint32_t module) { return acquire(device, card_type()); }
int synDeviceRelease(Device device) { return SUCCESS; }
int synDeviceSynchronize(Device device) { return SUCCESS; }

int synDeviceGetCount(uint32_t *count) {
    *count = 1;
    return SUCCESS;
}

int synDeviceGetCountByDeviceType(uint32_t *count, int type) {
    *count = type == card_type();
    return SUCCESS;
}

int synDeviceGetName(char *name, int length, Device device) {
    snprintf(name, (size_t)length, "%s", card_type() == DEVICE_GAUDI3 ? "GAUDI3" : "GAUDI2");
    return SUCCESS;
}

int synDriverGetVersion(char *version, int length) {
    snprintf(version, (size_t)length, "none");
    return SUCCESS;
}

int synDeviceGetMemoryInfo(Device device, uint64_t *free_bytes, uint64_t *total) {
    pthread_mutex_lock(&memory_lock);
    *total = memory_size();
    *free_bytes = *total - bytes_used;
    pthread_mutex_unlock(&memory_lock);
    return SUCCESS;
}

/* Only an acquired device has a size. The original knows the rest for a type of device, or refuses it. */
int synDeviceGetAttribute(uint64_t *values, const int *attributes, unsigned count, Device device) {
    int (*of_type)(uint64_t *, const int *, unsigned, int) = find_real("synDeviceTypeGetAttribute");
    for (unsigned index = 0; index < count; index++) {
        uint64_t free_bytes, total;
        int status = SUCCESS;
        synDeviceGetMemoryInfo(device, &free_bytes, &total);
        if (attributes[index] == DRAM_SIZE) values[index] = total;
        else if (attributes[index] == DRAM_FREE) values[index] = free_bytes;
        else status = of_type(values + index, attributes + index, 1, card_type());
        if (status != SUCCESS) return status;
    }
    return SUCCESS;
}

int synDeviceGetInfo(Device device, Info *info) {
    const int attributes[] = {DRAM_BASE, TPC_MASK};
    uint64_t values[2];
    int status = synDeviceGetAttribute(values, attributes, 2, device);
    if (status != SUCCESS) return status;
    info->sram_base = info->sram_size = 0;
    info->dram_base = values[0];
    info->dram_size = memory_size();
    info->tpc_mask = values[1];
    info->has_dram = 1;
    info->id = device;
    info->file = UINT32_MAX;
    info->type = card_type();
    return SUCCESS;
}

int synDeviceGetInfoV2(Device device, InfoV2 *info) {
    int status = synDeviceGetInfo(device, &info->info);
    info->index = 0;
    info->reserved = 0;
    return status;
}

/* ---- memory ---------------------------------------------------------------------------------------------------- */

int synDeviceMalloc(Device device, uint64_t size, uint64_t wanted, uint32_t flags, uint64_t *address) {
    Block *block = malloc(sizeof *block);
    int status = OUT_OF_DEVICE_MEMORY;
    pthread_mutex_lock(&memory_lock);
    if (block && size <= memory_size() - bytes_used) {
        *block = (Block){memory_base() + bytes_passed, size, blocks};
        blocks = block;
        bytes_used += size;
        bytes_passed += (size / PAGE + 1) * PAGE; /* never again, so that an address has one meaning */
        *address = block->address;
        status = SUCCESS;
    }
    pthread_mutex_unlock(&memory_lock);
    if (status != SUCCESS) free(block);
    return status;
}

int synDeviceFree(Device device, uint64_t address, uint32_t flags) {
    Block **link = &blocks, *found;
    pthread_mutex_lock(&memory_lock);
    while (*link && (*link)->address != address) link = &(*link)->next;
    if ((found = *link)) {
        *link = found->next;
        bytes_used -= found->size;
    }
    pthread_mutex_unlock(&memory_lock);
    free(found);
    return found ? SUCCESS : INVALID_ARGUMENT;
}

int synHostMalloc(Device device, uint64_t size, uint32_t flags, void **buffer) {
    return posix_memalign(buffer, PAGE, size ? size : 1) ? INVALID_ARGUMENT : SUCCESS;
}

int synHostFree(Device device, const void *buffer, uint32_t flags) {
    free((void *)buffer);
    return SUCCESS;
}

int synHostMap(Device device, uint64_t size, const void *buffer) { return SUCCESS; }
int synHostUnmap(Device device, const void *buffer) { return SUCCESS; }

int synMemCopyAsync(Handle stream, uint64_t source, uint64_t size, uint64_t target, int direction) {
    if (direction == TO_HOST) memset((void *)(uintptr_t)target, 0, size);
    return SUCCESS;
}

int synMemCopyAsyncMultiple(Handle stream, const uint64_t *sources, const uint64_t *sizes, const uint64_t *targets,
                            int direction, uint64_t count) {
    for (uint64_t index = 0; index < count; index++)
        synMemCopyAsync(stream, sources[index], sizes[index], targets[index], direction);
    return SUCCESS;
}

int synMemsetD8Async(uint64_t address, unsigned char value, size_t count, Handle stream) { return SUCCESS; }
int synMemsetD16Async(uint64_t address, uint16_t value, size_t count, Handle stream) { return SUCCESS; }
int synMemsetD32Async(uint64_t address, uint32_t value, size_t count, Handle stream) { return SUCCESS; }

/* ---- streams, events and launches: everything is complete as soon as it is issued ------------------------------ */

static int make_handle(Handle *handle) {
    *handle = (Handle)(atomic_fetch_add(&last_handle, 1) + 1);
    return SUCCESS;
}

int synStreamCreateGeneric(Handle *stream, Device device, uint32_t flags) { return make_handle(stream); }
int synStreamDestroy(Handle stream) { return SUCCESS; }
int synStreamWaitEvent(Handle stream, Handle event, uint32_t flags) { return SUCCESS; }
int synStreamSynchronize(Handle stream) { return SUCCESS; }
int synStreamQuery(Handle stream) { return SUCCESS; }
int synStreamSetAffinity(Device device, Handle stream, uint64_t affinity) { return SUCCESS; }

int synDeviceGetNextStreamAffinity(Device device, uint64_t *affinity) {
    *affinity = 1;
    return SUCCESS;
}

int synEventCreate(Handle *event, Device device, uint32_t flags) { return make_handle(event); }
int synEventDestroy(Handle event) { return SUCCESS; }
int synEventRecord(Handle event, Handle stream) { return SUCCESS; }
int synEventQuery(Handle event) { return SUCCESS; }
int synEventSynchronize(Handle event) { return SUCCESS; }
int synEventMapTensor(Handle *events, size_t count, const void *tensors, Handle recipe) { return SUCCESS; }

int synEventElapsedTime(uint64_t *nanoseconds, Handle start, Handle end) {
    *nanoseconds = 1;
    return SUCCESS;
}

int synLaunch(Handle stream, const void *tensors, uint32_t count, uint64_t workspace, Handle recipe, uint32_t flags) {
    return SUCCESS;
}

int synLaunchWithExternalEvents(Handle stream, const void *tensors, uint32_t count, uint64_t workspace, Handle recipe,
                                Handle *events, uint32_t num_events, uint32_t flags) {
    return SUCCESS;
}
