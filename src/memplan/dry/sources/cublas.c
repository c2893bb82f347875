/* cuBLAS and cuBLASLt as torch uses them. Torch itself allocates their workspaces (sizes fixed by its own code), so nothing here counts
   but the one algorithm that the heuristic offers. Every product returns success at once (library.py makes those). No header: handles are tickets. */
#include "dry.h"
#define EXPORT __attribute__((visibility("default")))
typedef struct { int pointers, math; void *stream; } handle;
EXPORT int cublasCreate_v2(handle **h) { *h = calloc(1, sizeof(handle)); return 0; }
EXPORT int cublasDestroy_v2(handle *h) { free(h); return 0; }
EXPORT int cublasSetStream_v2(handle *h, void *s) { h->stream = s; return 0; }
EXPORT int cublasGetStream_v2(handle *h, void **s) { *s = h->stream; return 0; }
EXPORT int cublasSetPointerMode_v2(handle *h, int m) { h->pointers = m; return 0; }
EXPORT int cublasGetPointerMode_v2(handle *h, int *m) { *m = h->pointers; return 0; }
EXPORT int cublasSetMathMode(handle *h, int m) { h->math = m; return 0; }
EXPORT int cublasGetMathMode(handle *h, int *m) { *m = h->math; return 0; }

#define MADE(f, g) EXPORT int f(void **p) { *p = calloc(1, 256); return 0; } EXPORT int g(void *p) { free(p); return 0; }
MADE(cublasLtMatmulDescCreate, cublasLtMatmulDescDestroy)
MADE(cublasLtMatrixLayoutCreate, cublasLtMatrixLayoutDestroy)
MADE(cublasLtMatmulPreferenceCreate, cublasLtMatmulPreferenceDestroy)
typedef struct { uint64_t algo[8]; size_t workspace; int state; float waves; int reserved[4]; } heuristic;   /* cublasLtMatmulHeuristicResult_t */
EXPORT int cublasLtMatmulAlgoGetHeuristic(void *h, void *d, void *a, void *b, void *c, void *dd, void *p, int want, heuristic *r, int *got) {
    if (want > 0) { memset(r, 0, sizeof *r); r->waves = 1; }
    *got = want > 0;
    return 0;
}
