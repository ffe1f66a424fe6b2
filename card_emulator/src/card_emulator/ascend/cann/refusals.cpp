// Functions that torch_npu is linked against but this emulator lacks. Each one reports its name.

#include <string>

namespace cann {
int refuse(int code, const std::string& why);
}

// The declarations are not those of the headers, because no argument is read.
constexpr int kUnsupported = 200006;  // ACL_ERROR_FEATURE_UNSUPPORTED

#define REFUSED(name) \
  extern "C" int name() { return cann::refuse(kUnsupported, #name " is not emulated"); }
// Functions that create arguments for operators of the old kind. None of these operators runs here, so they are refused.
#define NOTHING_MADE(name) \
  extern "C" void* name() { return nullptr; }
// Functions for profiling and monitoring tools.
#define NO_WATCHER(name) \
  extern "C" int name() { return 0; }

extern "C" int aclopCompileAndExecute(const char* name) {
  return cann::refuse(kUnsupported, std::string("the operator ") + name + " has no aclnn form here");
}

NOTHING_MADE(aclCreateDataBuffer)
NOTHING_MADE(aclCreateTensorDesc)
NOTHING_MADE(aclDestroyTensorDesc)
NOTHING_MADE(aclopCreateAttr)
NOTHING_MADE(aclopDestroyAttr)
NO_WATCHER(aclDestroyDataBuffer)
NO_WATCHER(MsprofGetHashId)
NO_WATCHER(MsprofRegisterCallback)
NO_WATCHER(MsprofReportAdditionalInfo)
NO_WATCHER(MsprofReportApi)
NO_WATCHER(MsprofReportCompactInfo)
NO_WATCHER(MsprofSysCycleTime)
NO_WATCHER(aclmdlFinalizeDump)
NO_WATCHER(aclmdlInitDump)
NO_WATCHER(aclmdlSetDump)
REFUSED(aclGetTensorDescDimV2)
REFUSED(aclGetTensorDescFormat)
REFUSED(aclGetTensorDescNumDims)
REFUSED(aclGetTensorDescType)
REFUSED(aclSetTensorDescName)
REFUSED(aclSetTensorFormat)
REFUSED(aclSetTensorPlaceMent)
REFUSED(aclSetTensorShape)
REFUSED(aclopSetAttrBool)
REFUSED(aclopSetAttrDataType)
REFUSED(aclopSetAttrFloat)
REFUSED(aclopSetAttrInt)
REFUSED(aclopSetAttrListBool)
REFUSED(aclopSetAttrListFloat)
REFUSED(aclopSetAttrListInt)
REFUSED(aclopSetAttrListListInt)
REFUSED(aclopSetAttrString)
REFUSED(aclrtBinaryGetFunction)
REFUSED(aclrtBinaryLoadFromData)
REFUSED(aclrtDeviceCanAccessPeer)
REFUSED(aclrtDeviceEnablePeerAccess)
REFUSED(aclrtDeviceGetBareTgid)
REFUSED(aclrtFreePhysical)
REFUSED(aclrtGetFunctionAddr)
REFUSED(aclrtMallocPhysical)
REFUSED(aclrtMapMem)
REFUSED(aclrtMemExportToShareableHandle)
REFUSED(aclrtMemImportFromShareableHandle)
REFUSED(aclrtMemSetPidToShareableHandle)
REFUSED(aclrtProcessReport)
REFUSED(aclrtReleaseMemAddress)
REFUSED(aclrtReserveMemAddress)
REFUSED(aclrtUnmapMem)
REFUSED(rtDevBinaryRegister)
REFUSED(rtFunctionRegister)
REFUSED(rtGetC2cCtrlAddr)
REFUSED(rtKernelLaunch)
