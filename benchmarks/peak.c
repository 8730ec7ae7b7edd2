/* The BF16 ceiling of one core: independent vdpbf16ps chains, nothing else. Prints GFLOP/s. */
#include <immintrin.h>
#include <stdio.h>
#include <time.h>

enum { CHAINS = 12, STEPS = 20000000, FLOPS = 64 }; /* 32 products and 32 sums an instruction */

int main(void) {
    __m512 sums[CHAINS];
    __m512bh a, b;
    __m512i ones = _mm512_set1_epi32(0x3f803f80);
    __builtin_memcpy(&a, &ones, sizeof a);
    __builtin_memcpy(&b, &ones, sizeof b);
    for (int i = 0; i < CHAINS; i++) sums[i] = _mm512_setzero_ps();
    struct timespec start, end;
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (long step = 0; step < STEPS; step++) {
        for (int i = 0; i < CHAINS; i++) sums[i] = _mm512_dpbf16_ps(sums[i], a, b);
        __asm__ volatile("" : "+v"(a), "+v"(b));
    }
    clock_gettime(CLOCK_MONOTONIC, &end);
    float check = 0;
    for (int i = 0; i < CHAINS; i++) check += _mm512_reduce_add_ps(sums[i]);
    double elapsed = (end.tv_sec - start.tv_sec) + 1e-9 * (end.tv_nsec - start.tv_nsec);
    printf("%f %f\n", (double)STEPS * CHAINS * FLOPS / elapsed / 1e9, (double)check);
    return 0;
}
