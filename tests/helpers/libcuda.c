/* A CUDA driver without a GPU: it writes down every launch. Triton's launcher calls it as it calls NVIDIA's.

   A line for each launch: function, grid, block, shared memory, stream, attributes, then each parameter's bytes. The
   number and sizes of the parameters are read from the cubin. */
#include <cuda.h>
#include <elf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_PARAMETERS = 256 };

struct kernel {
    const char* image;
    char name[256];
    int count, sizes[MOST_PARAMETERS];
};

static FILE* written;
static char* text;
static size_t length;

/* The lines since the last call. */
const char* launches(void) {
    static char* taken;
    free(taken);
    if (written) fclose(written);
    taken = text ? text : strdup("");
    written = NULL, text = NULL;
    return taken;
}

static CUresult find_parameters(struct kernel* kernel) { /* EIATTR_KPARAM_INFO: index, ordinal and offset, size << 18 */
    const Elf64_Ehdr* header = (const void*)kernel->image;
    const Elf64_Shdr* sections = (const void*)(kernel->image + header->e_shoff);
    const char* names = kernel->image + sections[header->e_shstrndx].sh_offset;
    for (int i = 0; i < header->e_shnum; i++) {
        const char *name = names + sections[i].sh_name, *at = kernel->image + sections[i].sh_offset;
        if (strncmp(name, ".nv.info.", 9) || strcmp(name + 9, kernel->name)) continue;
        for (const char* end = at + sections[i].sh_size; at + 16 <= end; at += 4) {
            unsigned info[4];
            memcpy(info, at, sizeof(info));
            if (info[0] != 0x000c1704) continue;
            int ordinal = info[2] & 0xffff;
            if (ordinal >= MOST_PARAMETERS) return CUDA_ERROR_INVALID_IMAGE;
            kernel->sizes[ordinal] = info[3] >> 18;
            kernel->count += 1;
        }
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_NOT_FOUND;
}

CUresult cuModuleLoadData(CUmodule* module, const void* image) {
    struct kernel* kernel = calloc(1, sizeof(*kernel)); /* kept until the process ends, as Triton keeps its modules */
    kernel->image = image;
    *module = (CUmodule)kernel;
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
    struct kernel* kernel = (struct kernel*)module;
    snprintf(kernel->name, sizeof(kernel->name), "%s", name);
    *function = (CUfunction)kernel;
    return find_parameters(kernel);
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction function, void** parameters, void** extra) {
    const struct kernel* kernel = (const struct kernel*)function;
    if (!written && !(written = open_memstream(&text, &length))) return CUDA_ERROR_OUT_OF_MEMORY;
    fprintf(written, "%s grid %u %u %u block %u %u %u shared %u stream %llu", kernel->name, c->gridDimX, c->gridDimY,
            c->gridDimZ, c->blockDimX, c->blockDimY, c->blockDimZ, c->sharedMemBytes, (unsigned long long)c->hStream);
    for (unsigned i = 0; i < c->numAttrs; i++)
        fprintf(written, " attribute %d=%d", c->attrs[i].id, c->attrs[i].value.cooperative);
    for (int i = 0; i < kernel->count; i++) {
        fputs(" ", written);
        for (int byte = kernel->sizes[i] - 1; byte >= 0; byte--)
            fprintf(written, "%02x", ((unsigned char*)parameters[i])[byte]);
    }
    fputs("\n", written);
    return CUDA_SUCCESS;
}

/* A descriptor holds what it was made of; its last eight bytes, the first that are written down, are the address. */
CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                                const cuuint64_t* dim, const cuuint64_t* strides, const cuuint32_t* box,
                                const cuuint32_t* steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion l2, CUtensorMapFloatOOBfill fill) {
    memset(map, 0, sizeof(*map));
    cuuint64_t* words = (cuuint64_t*)map;
    words[15] = (cuuint64_t)address;
    words[0] = type | rank << 8 | interleave << 16 | swizzle << 20 | l2 << 24 | fill << 28;
    for (unsigned i = 0; i < rank && i < 4; i++) {
        words[2 + 3 * i] = dim[i];
        words[3 + 3 * i] = i + 1 < rank ? strides[i] : 0;
        words[4 + 3 * i] = (cuuint64_t)box[i] << 32 | steps[i];
    }
    return rank <= 4 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
    *value = attribute == CU_DEVICE_ATTRIBUTE_WARP_SIZE ? 32 : 232448; /* of shared memory, as an H200 has */
    return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction function) {
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
    return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int* version) {
    *version = 13020;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char** words) {
    *words = "refused by tests/helpers/libcuda.c";
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) { return *device = 0, CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext* context) { return *context = (CUcontext)1, CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) { return CUDA_SUCCESS; }
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuPointerGetAttribute(void* data, CUpointer_attribute attribute, CUdeviceptr pointer) {
    return *(CUdeviceptr*)data = pointer, CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveClusters(int* count, CUfunction f, const CUlaunchConfig* c) { return CUDA_ERROR_UNKNOWN; }
CUresult cuCtxGetLimit(size_t* value, CUlimit limit) { return CUDA_ERROR_UNKNOWN; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_ERROR_UNKNOWN; }
